"""The toy worlds, which work offline: problems, an oracle, warm-started models and a report."""
