"""The laboratory: experiments, benchmarks, data sets and comparisons.

Only the command line and scripts import it. `import timm_sape` loads none of it.
"""
