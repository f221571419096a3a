"""Experiments, benchmarks, data sets and comparisons.

Only the command line and scripts import this package; `import timm_sape` does not. It needs the packages of
`pip install 'timm-sape[lab]'`.
"""
