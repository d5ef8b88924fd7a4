"""What is read out of figures."""

import datetime
import importlib.util
import unittest

import support  # noqa: F401, puts the modules on the path

import charts

HAS = importlib.util.find_spec("matplotlib")
if HAS:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt


@unittest.skipUnless(HAS, "matplotlib is not here")
class ChartsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        charts.remember_boxes()

    def tearDown(self):
        plt.close("all")

    def test_lines_by_dates(self):
        days = [datetime.date(2024, 1, day) for day in (1, 2)]
        figure, ax = plt.subplots()
        ax.plot(days, [0.5, 1.5], label="high")
        ax.set(title="Days", xlabel="Day", ylabel="Height (m)")
        found = charts.of_figure(figure)
        self.assertEqual((found["type"], found["title"]), ("line", "Days"))
        self.assertEqual((found["x_scale"], found["y_label"], found["y_unit"]), ("datetime", "Height (m)", "m"))
        (line,) = found["elements"]
        self.assertEqual(line["label"], "high")
        self.assertEqual([y for _, y in line["points"]], [0.5, 1.5])
        self.assertTrue(line["points"][0][0].startswith("2024-01-01T00:00:00"))

    def test_points_on_a_logarithmic_scale(self):
        figure, ax = plt.subplots()
        ax.scatter([1, 10], [2, 20], label="p")
        ax.set_xscale("log")
        found = charts.of_figure(figure)
        self.assertEqual((found["type"], found["x_scale"], found["y_scale"]), ("scatter", "log", "linear"))
        self.assertEqual(found["elements"], [{"label": "p", "points": [[1, 2], [10, 20]]}])

    def test_bars(self):
        figure, ax = plt.subplots()
        ax.bar(["a", "b"], [1, 2], label="g")
        self.assertEqual(
            charts.of_figure(figure)["elements"],
            [{"label": "a", "group": "g", "value": 1}, {"label": "b", "group": "g", "value": 2}],
        )

    def test_a_pie(self):
        figure, ax = plt.subplots()
        ax.pie([1, 3], labels=["q", "t"])
        found = charts.of_figure(figure)
        self.assertEqual([(one["label"], one["angle"]) for one in found["elements"]], [("q", 90.0), ("t", 270.0)])

    def test_boxes(self):
        figure, ax = plt.subplots()
        ax.boxplot([[1, 2, 3, 4, 100]], tick_labels=["b"]) if matplotlib.__version_info__ >= (3, 9) else ax.boxplot(
            [[1, 2, 3, 4, 100]], labels=["b"]
        )
        (box,) = charts.of_figure(figure)["elements"]
        self.assertEqual((box["label"], box["min"], box["median"], box["max"], box["outliers"]), ("b", 1, 3, 4, [100]))

    def test_several_none_and_nothing_known(self):
        figure, (left, right) = plt.subplots(1, 2)
        figure.suptitle("Both")
        left.plot([1], [1])
        right.imshow([[1, 2]])
        found = charts.of_figure(figure)
        self.assertEqual((found["type"], found["title"]), ("superchart", "Both"))
        self.assertEqual([one["type"] for one in found["elements"]], ["line", "unknown"])
        self.assertIsNone(charts.of_figure(plt.figure()))


if __name__ == "__main__":
    unittest.main()
