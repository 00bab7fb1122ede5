#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write a PTX file as a C string: embed_ptx.py gather.ptx gather_ptx.c. Run by the build."""
import pathlib
import sys

text = pathlib.Path(sys.argv[1]).read_text(encoding="ascii")
lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("//")]
quoted = "\n".join('    "%s\\n"' % line.replace("\\", "\\\\").replace('"', '\\"').replace("\t", " ") for line in lines)
pathlib.Path(sys.argv[2]).write_text(
    '/* Made from gather.ptx by embed_ptx.py. */\n#include "transport/gather_ptx.h"\n\n'
    "const char tp_gather_ptx[] =\n%s;\n" % quoted)
