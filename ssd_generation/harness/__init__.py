"""Methods side by side: their prompts, the engine that runs them, and the folders of their results.

In the order of imports: `peer_methods` and `methods` name what is compared, `texts` holds prompts and checks of texts,
`results` what is stored and reported, `run` the engine that interleaves calls, `peers` other runtimes in separate
processes.
"""
