"""Your own reward function. train.sh uses `compute_score` once this file defines it; until then, rules are used.

在此定义 compute_score 后，train.sh 即用它计算奖励；未定义时按 data_source 使用内置规则。

The arguments are a row's data_source, the answer, the row's ground_truth and its extra_info. The result is a number, or
a dict with `score`. `extract_final_answer` and other helpers need no import: docs/rewards.md.
"""

# def compute_score(data_source, solution_str, ground_truth, extra_info=None):
#     if data_source == "math_reasoning":
#         answer = extract_final_answer(solution_str)
#         return 1.0 if answer == ground_truth else 0.0
#     return 0.0
