"""A probe in parts that engines compute: each part is a file, and large matrices stay on the disk.

    corpus_parts       text -> files of batches, and the parts that read them
    divided_pass       the work of each part, by any engine
    joined_parts       states of parts -> Measurement

Read next: divided_pass.py, ../../engine (who computes), docs/scaling.md.
"""
