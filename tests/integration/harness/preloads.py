"""Libraries that tests write for themselves, to be preloaded."""

import os
import subprocess

# Keeps the memory of a segment for the next one.
ALLOCATOR = r"""
#include <stddef.h>
extern void *__libc_memalign(size_t alignment, size_t bytes);
extern void __libc_free(void *address);
static void *kept;
void *aligned_alloc(size_t alignment, size_t bytes) {
    if (alignment != 16 << 20)
        return __libc_memalign(alignment, bytes);
    if (!kept)
        kept = __libc_memalign(alignment, bytes);
    return kept;
}
void free(void *address) {
    if (address != kept)
        __libc_free(address);
}
"""


def compiled(cluster, name, text):
    source, library = (os.path.join(cluster.folder, f"{name}.{ending}") for ending in ("c", "so"))
    with open(source, "w") as file:
        file.write(text)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", source, "-o", library], check=True)
    return library
