"""How a run is kept: checkpoints that exist whole or not at all.

    <folder>/step-N/
        __0_0.distcp ...   tensors, one file a rank, by torch's Distributed Checkpoint (DCP)
        .metadata          DCP's index of them (a pickle; read by a restricted unpickler only)
        state.json         everything that is not a tensor: counters, data position, schedule ...
        config.toml        the resolved config of the run, loadable again
        manifest.json      written last, atomically: step, topology, size and checksum of every file above

A checkpoint exists when its manifest does. A folder without one is a save that never finished: it is skipped with a
warning, and cleared away once a newer save is complete. `manager` is what the trainer holds; `loading` finds and reads;
`storage` is the DCP reader and writer; `staging` keeps what is being written apart from what is being trained;
`folders`, `manifest` and `retention` are plain files and need no torch. See docs/checkpoints.md.
"""
