"""Tools to view, diagnose and plan runs, evaluate judges and merge adapters: python -m tools.NAME"""
