"""A probe in parts that engines compute: each part is a file, and large matrices stay on the disk.

    corpus_parts       text -> files of batches, and the parts that read them
    part_states        what a worker computes for a part
    divided_pass       all parts -> Measurement

Read next: divided_pass.py, ../../engine (who computes), docs/scaling.md.
"""
