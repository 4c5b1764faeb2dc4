"""Text to batches: sources, tokenizer, shards, sampler, loader.

`prepare` writes a folder of token shards; `TokenDataset` opens it; `BlockSampler` gives the windows that a run sees;
`train_batch` and `eval_batches` take them out; `Prefetcher` does so ahead of time.
"""
