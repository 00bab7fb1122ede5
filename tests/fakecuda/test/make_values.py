# SPDX-License-Identifier: Apache-2.0
"""Write SAME(name, value) for each value that cuda_api.h gives, for abi_check.c."""
import re
import sys

text = open(sys.argv[1], encoding="utf-8").read()
values = re.findall(r"\b((?:CUDA|CU)_[A-Z0-9_]+) = (-?\d+)", text)
if len(values) < 100:
    sys.exit(f"{sys.argv[1]}: only {len(values)} values found")
with open(sys.argv[2], "w", encoding="utf-8") as out:
    out.writelines(f"SAME({name}, {value});\n" for name, value in values)
