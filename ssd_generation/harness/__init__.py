"""Methods side by side: what they are asked, how they are run, and the folders that runs leave.

In the order of imports: `peer_methods` and `methods` name what is compared, `texts` holds prompts and what texts are
checked for, `results` what is stored and reported, `run` the engine that interleaves calls, `peers` other runtimes in
processes of their own.
"""
