import os
import signal
import subprocess
import sys
import textwrap

import pytest

from titanlike.launch.signals import STOP_SIGNALS, StopFlag


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_raises_the_flag_and_nothing_else(number):
    before = signal.signal(number, signal.SIG_DFL)  # whatever the tests themselves were started with
    try:
        with StopFlag() as stop:
            assert not stop.raised
            signal.raise_signal(number)
            assert stop.raised
            assert stop.signal == number
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_the_first_signal_is_remembered():
    with StopFlag() as stop:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(number)
        assert stop.signal == signal.SIGINT


def test_nohup_is_respected():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopFlag() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.raised
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def python(code: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path))}
    code = "import os, signal, time\nfrom titanlike.launch.signals import *\n" + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=30)


def test_the_third_interrupt_ends_the_process():
    done = python("""
        stop = StopFlag()
        for n in range(3):
            print(n, flush=True)
            os.kill(os.getpid(), signal.SIGINT)
        print("still here")
    """)
    assert done.stdout.split() == ["0", "1", "2"]
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("failed", "begun", "code", "output"),
    [(True, True, 1, ""), (True, False, 1, ""), (False, False, 0, "stopped\n"), (False, True, 0, "came back True\n")],
)
def test_a_blocked_rank_ends_if_another_has_failed_or_nothing_has_begun(failed, begun, code, output):
    done = python(f"""
        import ctypes, threading
        end_with_the_job(lambda: {failed}, lambda: {begun}, lambda: print("stopped", flush=True), patience=0.2)
        stop = StopFlag()
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        # As inside a collective: the signal lands in another thread, this one's C code knows nothing of it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGTERM}})
        ctypes.CDLL(None).sleep(2)
        print("came back", stop.raised)
    """)
    assert (done.returncode, done.stdout) == (code, output)


def test_the_start_is_interrupted_and_nothing_after_it():
    """A late signal, to a rank that reports its failure or leaves, is no failure of its own."""
    done = python("""
        begun = False
        try:
            with interruptible(over=lambda: begun):
                os.kill(os.getpid(), signal.SIGTERM)
                print("not reached")
        except KeyboardInterrupt:
            print("interrupted")
        try:
            with interruptible(over=lambda: begun):
                begun = True
                os.kill(os.getpid(), signal.SIGTERM)
                with StopFlag() as stop:
                    os.kill(os.getpid(), signal.SIGTERM)
                    print(stop.raised)
                raise ValueError
        except ValueError:
            os.kill(os.getpid(), signal.SIGTERM)
            print("reported")
    """)
    assert (done.returncode, done.stdout.split()) == (0, ["interrupted", "True", "reported"])
