"""What a matplotlib figure shows and what a table holds, as plain data: the `chart` and `data` of a result.

A chart has a type, a title and elements; see E2B's `charts` for the fields of each. A figure with several axes is a
`superchart` of them; what none of the types fits is `unknown`."""

import datetime
import math
import re


def plain(value):
    """Numbers and times as JSON has them."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, (datetime.datetime, datetime.date)):
        # A time that is missing is one too, and is not itself.
        return value.isoformat() if value == value else None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def plain_or_fail(value):
    """The same for what JSON itself does not know, numbers of numpy and times."""
    if hasattr(value, "tolist"):
        return value.tolist()
    found = plain(value)
    if found is value:
        raise TypeError
    return found


def unit(label):
    """What stands in brackets at the end of a label."""
    found = re.search(r"\(([^)]*)\)\s*$|\[([^\]]*)\]\s*$", label or "")
    return (found.group(1) or found.group(2)) if found else None


def scale(axis):
    # The method is as young as the warning about the attribute.
    converter = axis.get_converter() if hasattr(axis, "get_converter") else axis.converter
    converter = type(converter).__name__
    if "Date" in converter or "date" in converter.lower():
        return "datetime"
    if "Category" in converter or "Categor" in converter:
        return "categorical"
    return axis.get_scale()


def convert(values, kind):
    if kind == "datetime":
        import matplotlib.dates

        return [matplotlib.dates.num2date(value).isoformat() for value in values]
    return [plain(value) for value in values]


def points(ax, xs, ys, x_scale, y_scale):
    def own(axis, values, kind):
        if kind == "datetime":
            return convert(axis.convert_units(values), kind)
        if kind == "categorical":
            names = {int(at): text for text, at in getattr(axis.units, "_mapping", {}).items()}
            return [names.get(int(v), plain(v)) if not isinstance(v, str) else v for v in values]
        return [plain(value) for value in values]

    return [list(pair) for pair in zip(own(ax.xaxis, xs, x_scale), own(ax.yaxis, ys, y_scale))]


def label_of(artist, index):
    label = artist.get_label()
    return f"Line {index}" if not label or str(label).startswith("_") else str(label)


def two_dimensional(ax, kind, elements):
    x_label, y_label = ax.get_xlabel() or None, ax.get_ylabel() or None
    return {
        "type": kind,
        "title": ax.get_title() or None,
        "x_label": x_label,
        "y_label": y_label,
        "x_unit": unit(x_label),
        "y_unit": unit(y_label),
        "elements": elements,
    }


def with_ticks(ax, chart, x_scale, y_scale):
    for name, axis, kind in (("x", ax.xaxis, x_scale), ("y", ax.yaxis, y_scale)):
        chart[f"{name}_ticks"] = convert(axis.get_ticklocs(), kind)
        chart[f"{name}_tick_labels"] = [text.get_text() for text in axis.get_ticklabels()]
        chart[f"{name}_scale"] = kind
    return chart


def line(ax):
    kinds = scale(ax.xaxis), scale(ax.yaxis)
    elements = [
        {"label": label_of(one, index), "points": points(ax, one.get_xdata(), one.get_ydata(), *kinds)}
        for index, one in enumerate(ax.get_lines())
    ]
    return with_ticks(ax, two_dimensional(ax, "line", elements), *kinds)


def scatter(ax, collections):
    kinds = scale(ax.xaxis), scale(ax.yaxis)
    elements = []
    for index, one in enumerate(collections):
        offsets = one.get_offsets()
        xs, ys = [pair[0] for pair in offsets], [pair[1] for pair in offsets]
        elements.append({"label": label_of(one, index), "points": points(ax, xs, ys, *kinds)})
    return with_ticks(ax, two_dimensional(ax, "scatter", elements), *kinds)


def bar(ax, containers):
    elements = []
    for container in containers:
        lying = container.orientation == "horizontal"
        axis = ax.yaxis if lying else ax.xaxis
        names = {int(at): text for text, at in getattr(axis.units, "_mapping", {}).items()} if axis.units else {}
        for patch in container:
            middle = patch.get_y() + patch.get_height() / 2 if lying else patch.get_x() + patch.get_width() / 2
            value = patch.get_width() if lying else patch.get_height()
            name = names.get(round(middle), None)
            group = container.get_label()
            elements.append(
                {
                    "label": name if name is not None else f"{middle:g}",
                    "group": "" if str(group).startswith("_") else str(group),
                    "value": plain(value),
                }
            )
    return two_dimensional(ax, "bar", elements)


def pie(ax, wedges):
    elements = []
    for wedge in wedges:
        elements.append(
            {
                "label": wedge.get_label(),
                "angle": round(abs(wedge.theta2 - wedge.theta1), 3),
                "radius": plain(wedge.r),
            }
        )
    return {"type": "pie", "title": ax.get_title() or None, "elements": elements}


def box(ax):
    # A box plot is drawn, not kept: its numbers are those that were given to it.
    elements = []
    names = [text.get_text() for text in ax.get_xticklabels()]
    for index, stats in enumerate(getattr(ax, "_atoll_boxes", [])):
        label = stats.get("label") or (names[index] if index < len(names) else str(index + 1))
        elements.append(
            {
                "label": str(label),
                "min": plain(stats["whislo"]),
                "first_quartile": plain(stats["q1"]),
                "median": plain(stats["med"]),
                "third_quartile": plain(stats["q3"]),
                "max": plain(stats["whishi"]),
                "outliers": [plain(value) for value in stats.get("fliers", [])],
            }
        )
    return two_dimensional(ax, "box_and_whisker", elements)


def of_axes(ax):
    from matplotlib.collections import PathCollection
    from matplotlib.container import BarContainer
    from matplotlib.patches import Wedge

    wedges = [patch for patch in ax.patches if isinstance(patch, Wedge)]
    bars = [container for container in ax.containers if isinstance(container, BarContainer)]
    scattered = [one for one in ax.collections if isinstance(one, PathCollection)]
    if getattr(ax, "_atoll_boxes", None):
        return box(ax)
    if wedges:
        return pie(ax, wedges)
    if bars:
        return bar(ax, bars)
    if scattered:
        return scatter(ax, scattered)
    if ax.get_lines():
        return line(ax)
    return {"type": "unknown", "title": ax.get_title() or None, "elements": []}


def of_figure(figure):
    axes = figure.get_axes()
    if not axes:
        return None
    if len(axes) == 1:
        found = of_axes(axes[0])
        if not found["title"] and figure.get_suptitle():
            found["title"] = figure.get_suptitle()
        return found
    return {"type": "superchart", "title": figure.get_suptitle() or None, "elements": [of_axes(ax) for ax in axes]}


def of_table(frame):
    columns = frame.to_dict(orient="list")
    return {str(name): [plain(value) for value in values] for name, values in columns.items()}


def remember_boxes():
    """From now on, axes know the numbers of the boxes that are drawn in them."""
    import matplotlib.axes

    draw = matplotlib.axes.Axes.bxp

    def bxp(self, bxpstats, *args, **kwargs):
        self._atoll_boxes = getattr(self, "_atoll_boxes", []) + list(bxpstats)
        return draw(self, bxpstats, *args, **kwargs)

    matplotlib.axes.Axes.bxp = bxp
