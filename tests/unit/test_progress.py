import io
import time

import pytest

from netweight.core.progress import QUIET, Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_on_a_terminal_shows_bytes_per_second():
    stream = Terminal()
    with Progress(stream=stream).task("packing", 10_000_000) as task:
        task.update(5_000_000)
        task.describe("packing b")
        task.update(5_000_000)
    assert "packing: " in stream.getvalue()
    assert "/10.0M" in stream.getvalue()
    assert "B/s" in stream.getvalue()


def test_elsewhere_lines_are_rare_and_plain():
    stream = io.StringIO()
    with Progress(stream=stream).task("packing", 100) as task:
        for _ in range(100):
            task.update()
    assert stream.getvalue() == ""
    with Progress(stream=stream, every=0).task("packing", 2_000_000) as task:
        task.update(1_000_000)
    assert stream.getvalue() == "packing: 1.00 MB of 2.00 MB, about 00:00 left\n"
    stream.truncate(0)
    with Progress("plain", stream=stream, every=0).task("reading", unit="files") as task:
        task.update(1500)
    assert "reading: 1,500 files in 00:00" in stream.getvalue()
    stream.truncate(0)
    with Progress("plain", stream=stream, every=0).task("attacking", 2000, unit="updates") as task:
        task.update(1500)
    assert "attacking: 1,500 of 2,000 updates, about 00:00 left" in stream.getvalue()


def lines_of(stream, count):
    """Wait until a stream has so many lines, or longer than it can take; return them."""
    for _ in range(600):
        lines = stream.getvalue().splitlines()
        if len(lines) >= count:
            break
        time.sleep(0.05)
    assert len(lines) >= count
    return lines


def test_long_units_are_reported_while_they_run():
    stream = io.StringIO()
    progress = Progress("plain", stream=stream, every=0.2)
    with progress.task("chapters", 2, unit="chapters"), progress.task("localize", 3, unit="prompts") as task:
        lines = lines_of(stream, 2)
        assert lines[0].startswith("localize: 0 of 3 prompts, 00:0")
        assert lines[0].endswith(" so far")
        task.describe("localize (40 predictions)")
        lines = lines_of(stream, len(lines) + 2)
    assert lines[-1].startswith("localize (40 predictions): 0 of 3 prompts, ")
    assert not any("chapters" in line for line in lines)


def test_a_task_that_ended_is_not_reported():
    ended, open_ = io.StringIO(), io.StringIO()
    with Progress("plain", stream=ended, every=0.2).task("ended", 3, unit="prompts"):
        pass
    with Progress("plain", stream=open_, every=0.2).task("open", 3, unit="prompts"):
        lines_of(open_, 2)
    assert ended.getvalue() == ""


def test_quiet_is_silent_and_counts(capsys):
    with QUIET.task("x", 3) as task:
        task.update(2)
    QUIET.note("nothing")
    assert task.done == 2
    assert capsys.readouterr() == ("", "")


def test_track_passes_items_on_and_notes_are_lines():
    stream = io.StringIO()
    progress = Progress("plain", stream=stream, every=0)
    assert list(progress.track("abc", "letters", 3)) == ["a", "b", "c"]
    progress.note("done")
    assert stream.getvalue().splitlines()[-1] == "done"


@pytest.mark.parametrize("mode", ["bar", "plain", "off"])
def test_an_exception_passes_through_a_task(mode):
    with pytest.raises(ZeroDivisionError), Progress(mode, stream=io.StringIO()).task("x"):
        raise ZeroDivisionError


def test_events_carry_how_far_work_is_and_what_is_left():
    events = []
    progress = Progress(every=0, listener=events.append)
    with progress.task("packing", 4, unit="files") as task:
        task.update()
    progress.note("a note")
    first, note = events
    assert (first.description, first.done, first.total, first.unit) == ("packing", 1, 4, "files")
    assert first.seconds_left == pytest.approx(3 * first.seconds)
    assert str(first).startswith("packing: 1 of 4 files, about ")
    assert (str(note), note.total) == ("a note", None)
