"""A function in the style of verl's documentation: a synchronous rule that returns a plain number."""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    found = re.findall(r"#### (-?[0-9.,]+)", solution_str)
    return 1.0 if found and found[-1].replace(",", "") == ground_truth else 0.0
