"""Experiments: small transformers, trained to answer questions that no pretrained checkpoint can.

parts           the attention, contraction and feed-forward layers that a model is built from
transformer     one model whose parts are arguments
costs           parameters and multiplications of a model; models of equal parameters or equal compute
tasks           the protocol of a task, and tasks on tokens with a closed-form answer
text            text that is on this machine, and a BPE tokenizer trained on it
training        AdamW, deterministic by seed; a killed run resumes
run_folders     the files of a run
workers         the runs of an experiment on the engines of gradlogz
exporting       checkpoints in the format of transformers, which `gradlogz probe` and `gradlogz compare` read
metric, specific_heat, ascent, filtering, rest, needed, linearity, contraction
                the experiments, each with a plan.md that was written before its results

`python -m experiments NAME [--form FORM]`, or `make experiment NAME=... [FORM=...]`. The package does not import this
folder.
"""
