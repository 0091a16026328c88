"""Looking at a run, judging a judge, planning a run: python -m tools.NAME"""
