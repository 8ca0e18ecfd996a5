"""Finds out what a layer does by running it once, on tensors without values.

`table.layer_traces(blueprint)` returns, for each kind of layer in a run, a trace of a layer without
recomputation and one of a recomputed layer; `trace.at(sequences)` is what the layer does with a
micro-batch (`layer_trace.LayerPasses`):

    for kind, (plain, recomputed) in layer_traces(blueprint).items():
        passes = recomputed.at(blueprint.micro_batch_size)
        passes.forward.products     # shapes, dtype and bytes of each matrix product
        passes.forward.attentions   # heads, widths, tokens and window of each call of attention
        passes.backward.sent        # collectives, each with its group, operation and bytes
        passes.repeated.launches    # what the backward repeats of the forward
        passes.backward.peak        # highest memory above that at the beginning of the pass
        passes.kept                 # sizes of the tensors that are kept until the backward
        passes.deferred             # those that wait for the gradients of weights

The passes `inputs` and `weights`, and `deferred`, are empty unless the run's schedule splits
backwards. A table of many layouts makes a `wanted.WantedTrace` for each distinct combination, and
passes all of them to `table.table_of(model).traces` at once. Traces are remembered on disk, so that
only the first plan of a model records them, which loads torch.

Documents are not known here: each sequence is one, and the keys that a query sees follow from the
length and the window. Experts are chosen equally often.
"""
