"""Runs in every Python kernel: figures also tell what they show, tables what they hold, lists and dictionaries come as JSON
too, images that are saved are shown. Nothing of it is among the names of whoever uses the kernel."""


def _install(here):
    import importlib.util
    import json
    import os

    from IPython import get_ipython
    from IPython.core.formatters import BaseFormatter, JSONFormatter
    from traitlets import Unicode

    found = importlib.util.spec_from_file_location("_atoll_charts", os.path.join(here, "charts.py"))
    charts = importlib.util.module_from_spec(found)
    found.loader.exec_module(charts)
    shell = get_ipython()

    class Chart(BaseFormatter):
        format_type = Unicode("e2b/chart")
        print_method = Unicode("_repr_e2b_chart_")
        _return_type = (dict,)

        def pop(self, typ, default=None):
            """Setting up inline figures takes their formatters away, to put in others; not this one."""
            return default

    class Data(BaseFormatter):
        format_type = Unicode("e2b/data")
        print_method = Unicode("_repr_e2b_data_")
        _return_type = (dict,)

    class Json(JSONFormatter):
        """As usual, and for lists and dictionaries that JSON can hold."""

        def __call__(self, value):
            if type(value) in (list, dict):
                try:
                    return json.loads(json.dumps(value, default=charts.plain_or_fail, allow_nan=False))
                except (TypeError, ValueError, RecursionError):
                    return None
            return super().__call__(value)

    def chart(figure):
        try:
            return charts.of_figure(figure)
        except Exception:  # its picture is there all the same
            return {"type": "unknown", "title": None, "elements": []}

    formatters = shell.display_formatter.formatters
    for kind in (Chart, Data, Json):
        formatter = kind(parent=shell.display_formatter)
        formatters[formatter.format_type] = formatter
    formatters["e2b/chart"].for_type_by_name("matplotlib.figure", "Figure", chart)
    formatters["e2b/data"].for_type_by_name("pandas.core.frame", "DataFrame", charts.of_table)
    formatters["e2b/data"].for_type_by_name("pandas", "DataFrame", charts.of_table)

    def show_saved_images():
        import PIL.Image
        from IPython.display import display

        save = PIL.Image.Image.save

        def save_and_show(self, fp, *args, **kwargs):
            saved = save(self, fp, *args, **kwargs)
            # Into a file, that is: what displays an image saves it into memory, through here.
            if isinstance(fp, (str, bytes)) or hasattr(fp, "__fspath__"):
                display(self)
            return saved

        PIL.Image.Image.save = save_and_show

    charts.remember_boxes()
    show_saved_images()
    # Whoever plots first must not wait for it.
    shell.run_line_magic("matplotlib", "inline")

    # The environment of one execution: set before it, put back after it.
    before = {}

    def enter_environment(env):
        before.update((name, os.environ.get(name)) for name in env)
        os.environ.update(env)

    def leave_environment():
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        before.clear()

    shell.enter_environment, shell.leave_environment = enter_environment, leave_environment

    def tell_at(path):
        """From now on, what the kernel tells is written to this socket, from where it is told: one line for each message,
        its header, its parent's and its content. What is followed at once by more waits for that. A lock stands for the
        thread that would send it otherwise: no two write at once, and what a stream holds is sent before whatever comes
        after it."""
        import socket
        import sys
        import threading

        channel = socket.socket(socket.AF_UNIX)
        channel.connect(path)
        locks, held, here = {}, [], os.getpid()

        def renew():
            locks.update(channel=threading.Lock(), stdout=threading.RLock(), stderr=threading.RLock())

        renew()
        os.register_at_fork(after_in_child=renew)
        thread = shell.kernel.iopub_thread
        send_there = thread._really_send

        def send(frames, *args, **kwargs):
            if os.getpid() != here:
                return send_there(frames, *args, **kwargs)  # a child tells its parent, which comes back here
            at = frames.index(b"<IDS|MSG>") + 2
            header, parent, _, content = frames[at : at + 4]
            kind = bytes(frames[0]).rpartition(b".")[2]
            if kind == b"status" and b'"busy"' in content:
                return
            with locks["channel"]:
                held.append(b"[%b,%b,%b]\n" % (header, parent, content))
                if kind not in (b"execute_input", b"execute_result"):
                    line = b"".join(held)
                    held.clear()
                    channel.sendall(line)

        thread._really_send = thread.send_multipart = send

        def flushing(stream):
            flush_there = stream._flush

            def flush():
                with locks[stream.name]:
                    flush_there()

            stream._flush = stream.flush = flush

        flushing(sys.stdout)
        flushing(sys.stderr)

    shell.tell_at = tell_at
    shell.kernel._execute_sleep = 0  # it waits for the thread that is no longer in the way


_install(__file__.rpartition("/")[0])
del _install
