"""From text to batches: sources, tokenizer, shards, sampler, loader.

`prepare` writes a folder of token shards, and `TokenDataset` opens it. `BlockSampler` selects the windows of a run.
`train_batch` and `eval_batches` read them, and `Prefetcher` reads them in advance.
"""
