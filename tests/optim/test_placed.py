"""State as sharded tensors: the same memory, wherever that is."""


def test_what_is_offloaded_stays_where_it_is(pool):
    """A mesh of another device than the memory's, as with training.enable_cpu_offload: nothing is copied there."""
    for same_memory, device in pool.run("tests.optim.updates:offloaded", world=1):
        assert same_memory and device == "cpu"
