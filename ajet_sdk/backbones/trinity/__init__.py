"""The `trinity` backbone: Trinity-RFT on Ray, with vLLM and verl on GPUs, or with
`ajet trainer serve` on a CPU.

`backbone` is the driver's side, `workflow` and `batches` run in Trinity's actors, and `learner` is
the child process that trains and samples without GPUs. Nothing is imported here: each process loads
its part.
"""
