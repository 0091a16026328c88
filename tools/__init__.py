"""Tools to view and diagnose a run, evaluate a judge, merge adapters and plan a run: python -m tools.NAME"""
