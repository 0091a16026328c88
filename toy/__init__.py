"""The offline miniature: problems, oracle, warm-started models, report."""
