import pytest

from titanlike.observe.throughput import Throughput


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


def make(clock, **options) -> Throughput:
    return Throughput(clock=clock, **options)


def test_the_first_step_is_divided_by_one_and_not_by_log_freq(clock):
    meter = make(clock)
    meter.start(step=0, tokens=0)
    clock.now += 2.0
    row = meter.read(step=1, tokens=1000)
    assert (row["step_seconds"], row["tokens_per_second"]) == (2.0, 500.0)
    clock.now += 9.0
    row = meter.read(step=10, tokens=10_000)
    assert (row["step_seconds"], row["tokens_per_second"]) == (1.0, 1000.0)


def test_after_a_resume_only_this_process_counts(clock):
    meter = make(clock)
    clock.now += 50.0  # loading
    meter.start(step=997, tokens=997_000)
    clock.now += 6.0
    row = meter.read(step=1000, tokens=1_000_000)
    assert (row["step_seconds"], row["tokens_per_second"]) == (2.0, 500.0)


def test_validation_and_saving_belong_to_no_step_and_leave_the_counts_alone(clock):
    meter = make(clock)
    meter.start(step=0, tokens=0)
    clock.now += 1.0
    with meter.paused("validation"):
        clock.now += 30.0
    with meter.paused("checkpoint"):
        clock.now += 5.0
    clock.now += 1.0
    with meter.paused("validation"):
        clock.now += 10.0
    row = meter.read(step=2, tokens=200)
    assert row["step_seconds"] == pytest.approx(1.0)
    assert row["tokens_per_second"] == pytest.approx(100.0)
    assert row["validation_seconds"] == pytest.approx(40.0)
    assert row["checkpoint_seconds"] == pytest.approx(5.0)
    clock.now += 1.0
    row = meter.read(step=3, tokens=300)
    assert row["tokens_per_second"] == pytest.approx(100.0)
    assert "validation_seconds" not in row


def test_waiting_for_data_is_a_part_of_the_step(clock):
    meter = make(clock)
    meter.start(step=0, tokens=0)
    for _ in range(4):
        with meter.waiting_for_data():
            clock.now += 0.25
        clock.now += 0.75
    row = meter.read(step=4, tokens=4)
    assert row["data_seconds"] == pytest.approx(0.25)
    assert row["step_seconds"] == pytest.approx(1.0)


def test_the_device_is_waited_for_before_a_pause_begins(clock):
    def finish_queued_work():
        clock.now += 3.0

    meter = make(clock, synchronize=finish_queued_work)
    meter.start(step=0, tokens=0)
    with meter.paused("validation"):
        pass
    row = meter.read(step=1, tokens=1)
    assert row["step_seconds"] == pytest.approx(3.0)
    assert row["validation_seconds"] == pytest.approx(3.0)


def test_a_pause_that_raises_is_still_taken_off(clock):
    meter = make(clock)
    meter.start(step=0, tokens=0)
    with pytest.raises(RuntimeError), meter.paused("checkpoint"):
        clock.now += 7.0
        raise RuntimeError
    clock.now += 1.0
    assert meter.read(step=1, tokens=1)["step_seconds"] == pytest.approx(1.0)


def test_mfu_is_of_all_devices_and_null_without_a_peak(clock):
    meter = make(clock, flops_per_token=10, peak_flops=1000.0, world_size=4)
    meter.start(step=0, tokens=0)
    clock.now += 1.0
    assert meter.read(step=1, tokens=200)["mfu"] == pytest.approx(10 * 200 / 4000)
    meter = make(clock, flops_per_token=10)
    clock.now += 1.0
    assert meter.read(step=1, tokens=200)["mfu"] is None


def test_an_empty_window_has_no_speed(clock):
    meter = make(clock)
    meter.start(step=5, tokens=50)
    clock.now += 1.0
    row = meter.read(step=5, tokens=50)
    assert row == dict.fromkeys(["tokens_per_second", "mfu", "step_seconds", "data_seconds"])


def test_time_left_is_by_the_median_step_without_the_first(clock):
    meter = make(clock)
    assert meter.seconds_left(0, 100) is None
    meter.start(step=0, tokens=0)
    for step, seconds in enumerate([60.0, 1.0, 1.0, 30.0, 1.0], start=1):
        clock.now += seconds
        meter.read(step, tokens=step)
        if step == 1:
            assert meter.seconds_left(1, 11) == pytest.approx(600.0)
    assert meter.seconds_left(5, 100) == pytest.approx(95.0)
    assert meter.seconds_left(100, 100) == 0
