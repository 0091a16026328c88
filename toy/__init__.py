"""The toy worlds, which need no network: problems, an oracle, warm-started models and a report."""
