"""The `verl` backbone: verl on Ray with vLLM, sampling and training in turn on the same GPUs.

`backbone` is the driver's side; `manager`, `rows` and `slots` run in verl's trainer, `runner` and
`sampler` in a process on each node. Nothing is imported here: each process loads its part.
"""
