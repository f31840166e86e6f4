import io
import math

import pytest

from titanlike.observe.console import ConsoleSink, count, duration, number

ROW = {
    "step": 20,
    "loss": 2.34567,
    "grad_norm": 0.81234,
    "learning_rate": 3e-4,
    "tokens": 40960,
    "trained_tokens": 40000,
    "tokens_per_second": 12345.6,
    "mfu": 0.4123,
    "step_seconds": 0.2,
    "data_seconds": 0.01,
    "memory_gib": 3.14159,
    "epoch": 0.5,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "60")


def printed(values, file=None, **options) -> str:
    file = file or io.StringIO()
    sink = ConsoleSink(last_step=1000, file=file, **options)
    sink.log(values["step"], values)
    sink.close()
    return file.getvalue()


def test_a_line_in_a_file_is_plain_and_whole():
    text = printed(ROW, seconds_left=lambda step: 8000.0)
    assert text.endswith("\n")
    assert text.count("\n") == 1, "longer than the terminal is wide, and still one line"
    assert text.isascii()
    assert "\x1b" not in text
    time_of_day, line = text.rstrip("\n").split(" ", 1)
    assert len(time_of_day) == len("12:34:56")
    assert line == (
        "step   20/1000  loss 2.3457  grad norm 0.8123  lr 0.0003  tok/s 12,346  MFU 41.2%  mem 3.14 GiB  left 2h 13m"
    )


def test_colour_on_a_terminal_unless_one_asks_for_none(monkeypatch):
    assert "\x1b[" in printed(ROW, Terminal())
    assert "\x1b" not in printed(ROW, Terminal(), plain=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in printed(ROW, Terminal())
    sink = ConsoleSink(last_step=10, file=(terminal := Terminal()))
    sink.banner("titanlike", {"model": "llama3"})
    assert "\x1b" not in terminal.getvalue()


def test_what_is_not_known_is_not_shown():
    text = printed({**ROW, "mfu": None, "grad_norm": None})
    for placeholder in ("MFU", "grad norm", "None", "-1", "nan", "left"):
        assert placeholder not in text


def test_a_nan_is_shown_as_one():
    assert "loss nan" in printed({**ROW, "loss": math.nan})
    assert "grad norm inf" in printed({**ROW, "grad_norm": math.inf})


def test_validation_has_a_line_of_its_own():
    lines = printed({**ROW, "validation_loss": 2.5, "validation_seconds": 3.21}).splitlines()
    assert len(lines) == 2
    assert "validation" not in lines[0]
    assert lines[1].endswith("step   20/1000  validation loss 2.5000  in 3.2s")


def test_what_an_objective_adds_is_shown():
    assert "  reward accuracy 0.625" in printed({**ROW, "reward_accuracy": 0.625})


def test_the_time_of_a_validation_alone_is_no_line():
    assert printed({"step": 3, "validation_seconds": 1.0, "tokens": 5}) == ""


@pytest.mark.parametrize("file", [io.StringIO, Terminal])
def test_banner_says_everything_and_takes_brackets_literally(file):
    out = file()
    sink = ConsoleSink(last_step=10, file=out)
    sink.banner("titanlike 0.1", {"model": "llama3 8B", "checkpoints": "/runs/[bold]x/checkpoints"})
    for text in ("titanlike 0.1", "model", "llama3 8B", "/runs/[bold]x/checkpoints"):
        assert text in out.getvalue()


def test_a_terminal_without_utf8_still_gets_its_lines():
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    sink = ConsoleSink(last_step=10, file=file)
    sink.banner("titanlike", {"layout": "replicate 2 × shard 2"})
    sink.close()
    assert b"replicate 2 ? shard 2" in raw.getvalue()


def test_writing_for_people():
    assert [duration(s) for s in (0.4, 42, 185, 8000, 367_000)] == ["0s", "42s", "3m 05s", "2h 13m", "4d 05h"]
    assert [count(n) for n in (950, 12_345, 8_030_261_248, 4.05e11)] == ["950", "12.3K", "8.03B", "405B"]
    assert [number(x) for x in (0.812345, 12.3456, 3e-5)] == ["0.8123", "12.35", "3e-05"]
