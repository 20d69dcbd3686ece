"""Declarations of the package's protocols: settings, inputs, cost and titles; torch-free.

Rules and plans read them. `work` names the module and function that compute the metrics. A new
protocol is a module of its own beside this package; `maect.evaluate` registers it.
"""
