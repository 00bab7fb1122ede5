"""Mooncake's own modes of segment memory, with Tidepool configured: bytes go the short way in each of them, memory is made once
and as the mode wants it, and where that cannot be, one line says which of the two wins."""

import re
import subprocess

import pytest
from harness import actions_process
from harness import actions_store as actions
from harness.cluster import MIB
from harness.mounts import FREE, gigantic_pages, huge_pages, mounted, number, segment_folder
from harness.wheels import SCARCE

pytestmark = pytest.mark.stores

SIZES = [4096, 65537, 3 * MIB]
SEGMENT = 64 * MIB
PAGES = SEGMENT >> 21
LOCAL_PAGES = 16 * MIB >> 21  # the client's own buffer, which is Mooncake's in any case
WHERE = ["memfd", "tmpfs", "hugetlbfs", "cumem"]


def move(cluster, engine, name="key"):
    before = cluster.counters(engine)
    keys = [f"{name}{index}" for index in range(len(SIZES))]
    assert engine.call(actions.write_keys, keys=keys, sizes=SIZES, seed=1) == [0] * len(keys)
    assert engine.call(actions.read_keys, keys=keys, sizes=SIZES, seed=1) == {"results": SIZES, "wrong": []}
    cluster.assert_local(engine, before, written=sum(SIZES), read=sum(SIZES))


def moved_with(cluster, bytes=SEGMENT, **settings):
    """A store with these settings, after an engine has used it; with what it is made of."""
    store = cluster.store(segment_bytes=bytes, environment={**cluster.store_environment(), **settings})
    engine = cluster.engine()
    cluster.warm(engine)
    move(cluster, engine)
    if cluster.stock:
        return store, ""
    (segment,) = cluster.counters(store).segments
    assert segment["bytes"] == bytes
    return store, segment["detail"]


def huge_pages_of(process):
    """How many pages of the pool this process has mapped (the pool itself is everybody's)."""
    with open(f"/proc/{process.pid}/smaps") as file:
        kib = sum(int(line.split()[1]) for line in file if line.startswith(("Shared_Hugetlb", "Private_Hugetlb")))
    return kib >> 11


def end(cluster, store):
    assert store.call(actions.close) == 0
    assert store.finish() == 0
    cluster.assert_no_rule_broken()


def said(store, text):
    """Exactly one line says this, and none says anything else aloud."""
    assert len(store.warnings) == 1 and text in store.warnings[0], f"not just {text!r}: {store.warnings}"
    return True


# ---- MC_STORE_USE_HUGEPAGE


@pytest.mark.hugepages
@pytest.mark.wheels
@pytest.mark.parametrize("page", [None, "2MB"], ids=["default", "2MB"])
def test_huge_pages_of_the_pool_are_shared(cluster, page):
    """Both work: the segment lies on pages of the pool, once, and they come back."""
    with huge_pages(PAGES + LOCAL_PAGES):
        settings = {"MC_STORE_USE_HUGEPAGE": "1", **({"MC_STORE_HUGEPAGE_SIZE": page} if page else {})}
        store, detail = moved_with(cluster, **settings)
        assert huge_pages_of(store) == PAGES + LOCAL_PAGES
        assert cluster.stock or detail == "memfd, 2 MiB pages"
        assert store.warnings == []
        assert store.call(actions.close) == 0
        assert huge_pages_of(store) == 0
        assert store.finish() == 0


@pytest.mark.hugepages
def test_huge_pages_in_a_hugetlbfs_directory(newest):
    with segment_folder("hugetlbfs", (SEGMENT >> 20) + 16) as where:
        newest.use_segments(where)
        store, detail = moved_with(newest, MC_STORE_USE_HUGEPAGE="1")
        assert newest.stock or detail == f"hugetlbfs {where}"
        assert store.warnings == []
        end(newest, store)


@pytest.mark.hugepages
def test_huge_pages_of_another_size_than_the_directorys(newest):
    """The client's own buffer would need pages of the other size: it has none."""
    with gigantic_pages(1), mounted("hugetlbfs", "pagesize=1G,mode=0700") as where:
        newest.use_segments(where)
        newest.start_master()
        store = newest.process("store", {**newest.store_environment(), "MC_STORE_USE_HUGEPAGE": "1"})
        newest.set_up(store, segment_bytes=SEGMENT, local_bytes=0)
        engine = newest.engine()
        newest.warm(engine)
        move(newest, engine)
        if not newest.stock:
            (segment,) = newest.counters(store).segments
            assert segment["detail"] == f"hugetlbfs {where}" and segment["bytes"] == 1 << 30
            assert said(store, f"those of MC_STORE_SHM_SEGMENT_DIR={where} are of 1048576 KiB: the directory wins")
        end(newest, store)


@pytest.mark.hugepages
def test_huge_pages_and_a_tmpfs_directory(newest):
    with huge_pages(LOCAL_PAGES), mounted("tmpfs", "mode=0700") as where:
        newest.use_segments(where)
        store, detail = moved_with(newest, MC_STORE_USE_HUGEPAGE="1")
        assert newest.stock or detail == f"tmpfs {where}"
        assert newest.stock or said(store, f"MC_STORE_SHM_SEGMENT_DIR={where} are of 4 KiB: the directory wins")
        end(newest, store)


@pytest.mark.hugepages
def test_huge_pages_and_cuda_memory(newest):
    with huge_pages(LOCAL_PAGES):
        newest.use_segments("cumem")
        store, detail = moved_with(newest, MC_STORE_USE_HUGEPAGE="1")
        assert newest.stock or detail == "CUDA host memory"
        assert newest.stock or said(store, "MC_STORE_USE_HUGEPAGE is not followed: MC_STORE_CUMEM_SOCKET_DIR wins")
        end(newest, store)


@pytest.mark.hugepages
def test_a_pool_that_is_too_small(newest):
    if newest.stock:
        pytest.skip("Mooncake's own setup fails then")
    with huge_pages(LOCAL_PAGES):
        # Others may have left some there.
        segment = SEGMENT + (number(FREE) // 8 * 8 << 21)
        store, detail = moved_with(newest, segment, MC_STORE_USE_HUGEPAGE="1")
        assert detail == "memfd, THP advised"
        assert said(store, f"MC_STORE_USE_HUGEPAGE: the segment needs {segment >> 21} pages of 2048 KiB")
        end(newest, store)


# ---- modes that need network cards: their allocation in place of the ordinary one


REDIRECT = r"""
#include <stddef.h>
#include <stdlib.h>
#define NAME(mangled) __asm__(mangled)
void *thp(size_t) NAME("_ZN8mooncake31allocate_buffer_thp_interleavedEm");
void *numa(size_t, const void *, size_t) NAME("_ZN8mooncake29allocate_buffer_numa_segmentsEmRKSt6vectorIiSaIiEEm");
void *plain(size_t, const void *, size_t, void *) NAME(
    "_ZN8mooncake32allocate_buffer_allocator_memoryEmRKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEEmPNS_18DmaBufferAllocatorE");
void *plain(size_t bytes, const void *protocol, size_t alignment, void *allocator) {
    static int nodes[2] = {0, 0};
    struct { int *begin, *end, *room; } vector = {nodes, nodes + 2, nodes + 2};
    const char *mode = getenv("REDIRECT");
    if (alignment < 1 << 20 || !mode)
        return aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    return *mode == 't' ? thp(bytes) : numa(bytes, &vector, *mode == 'h' ? 2 << 20 : 4096);
}
"""


def redirection(cluster):
    source, library = f"{cluster.folder}/redirect.c", f"{cluster.folder}/redirect.so"
    with open(source, "w") as file:
        file.write(REDIRECT)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-w", source, "-o", library], check=True)
    return library


def redirected(cluster, mode, **more):
    """A store whose segments come from the allocation of another mode."""
    return moved_with(cluster, LD_PRELOAD=f"{redirection(cluster)}:{cluster.preload}", REDIRECT=mode, **more)


def regions(cluster, store):
    """The pieces of its segment, by their mappings."""
    (segment,) = cluster.counters(store).segments
    found = []
    with open(f"/proc/{store.pid}/maps") as file:
        for line in file:
            first, last = (int(word, 16) for word in re.match(r"(\w+)-(\w+)", line).groups())
            if segment["base"] <= first < segment["base"] + segment["bytes"]:
                found.append((last - first) // MIB)
    return segment["pieces"], found


@pytest.mark.parametrize("where", WHERE)
def test_numa_segments(newest, where):
    """Both work: each node's region is a piece."""
    if newest.stock:
        pytest.skip("Mooncake's own needs the cards")
    with segment_folder(where, SEGMENT >> 20) as folder:
        newest.use_segments(folder)
        store, _ = redirected(newest, "n")
        assert store.warnings == []
        pieces, found = regions(newest, store)
        assert pieces == 2 and (where == "cumem" or found == [32, 32])
        if where != "cumem":
            (segment,) = newest.counters(store).segments
            with open(f"/proc/{store.pid}/numa_maps") as file:
                line = next(line for line in file if line.startswith(f"{segment['base']:x} "))
            assert " bind:0 " in line
        newest.assert_no_rule_broken()
        store.kill()


@pytest.mark.hugepages
def test_numa_segments_on_huge_pages(newest):
    if newest.stock:
        pytest.skip("Mooncake's own needs the cards")
    with huge_pages(PAGES):
        store, detail = redirected(newest, "h")
        assert detail == "memfd, 2 MiB pages" and huge_pages_of(store) == PAGES
        assert store.warnings == []
        store.kill()


def test_numa_segments_and_tidepools_own_nodes(newest):
    if newest.stock:
        pytest.skip("Mooncake's own needs the cards")
    store, _ = redirected(newest, "n", MC_STORE_CUMEM_NUMA_NODES="0")
    assert said(store, "MC_STORE_CUMEM_NUMA_NODES wins over the NUMA nodes of the network cards")


@pytest.mark.parametrize("where", WHERE)
def test_interleaved_transparent_huge_pages(newest, where):
    if newest.stock:
        pytest.skip("Mooncake's own needs the cards")
    with segment_folder(where, SEGMENT >> 20) as folder:
        newest.use_segments(folder)
        store, _ = redirected(newest, "t")
        assert said(store, "interleaved over the NUMA nodes (protocol efa): Tidepool's wins")
        newest.assert_no_rule_broken()
        store.kill()


def test_memory_that_is_short_once(newest):
    """A line says why there is no segment, and the next try has one."""
    if newest.stock:
        pytest.skip("Mooncake's own needs the cards")
    newest.start_master()
    environment = newest.store_environment()
    preload = f"{redirection(newest)}:{SCARCE}:{environment['LD_PRELOAD']}"
    store = newest.process("store", {**environment, "LD_PRELOAD": preload, "REDIRECT": "t", "SCARCE": "allocate:1:1"})
    sizes = dict(segment_bytes=SEGMENT, local_bytes=16 * MIB)
    assert store.call(actions.setup, limit_s=60, master=newest.master_address, **sizes) != 0
    assert said(store, "no memory for the settings of a segment of 64 MiB")
    newest.set_up(store, **sizes)


# ---- MC_STORE_PIN_MEMORY_MAX_BYTES


@pytest.mark.hugepages
@pytest.mark.parametrize("settings", [{}, {"MC_STORE_USE_HUGEPAGE": "1"}], ids=["plain", "huge"])
@pytest.mark.parametrize("where", ["memfd", "tmpfs", "hugetlbfs"])
def test_pinned_segments_are_the_shared_ones(newest, where, settings):
    """Both work: what is pinned is what engines map, since it is laid before it is pinned and never again."""
    newest.double = True
    room = (SEGMENT >> 20) + (16 if settings else 0)
    with segment_folder(where, room) as folder:
        with huge_pages(PAGES + LOCAL_PAGES) if settings and where == "memfd" else mounted("tmpfs", "mode=0700"):
            if settings and where == "tmpfs":
                settings = {}
            newest.use_segments(folder)
            store, _ = moved_with(newest, MC_STORE_PIN_MEMORY_MAX_BYTES=str(SEGMENT), **settings)
            assert "cudaHostRegister" in newest.driver_calls(store)
            assert "cudaHostRegister succeeded for Store segment" in store.log
            assert store.warnings == []
            if not newest.stock:
                (segment,) = newest.counters(store).segments
                maps = store.call(actions_process.mapped_files)
                assert any("tidepool" in name or folder in name for name in maps), maps
                assert segment["pieces"] >= 1
            end(newest, store)
            assert "cudaHostUnregister" in newest.driver_calls(store)


def test_pinning_and_cuda_memory(newest):
    newest.use_segments("cumem")
    store, _ = moved_with(newest, MC_STORE_PIN_MEMORY_MAX_BYTES=str(SEGMENT))
    if not newest.stock:
        assert said(store, "MC_STORE_PIN_MEMORY_MAX_BYTES is not followed: segments of MC_STORE_CUMEM_SOCKET_DIR are pinned")
        assert "cudaHostRegister" not in newest.driver_calls(store)
    end(newest, store)


# ---- MC_FORCE_SHM


@pytest.mark.parametrize("where", WHERE)
def test_mooncakes_own_shared_memory(newest, where):
    with segment_folder(where, SEGMENT >> 20) as folder:
        newest.use_segments(folder)
        store = newest.store(segment_bytes=SEGMENT, environment={**newest.store_environment(), "MC_FORCE_SHM": "1"})
        engine = newest.engine(environment={**newest.engine_environment(), "MC_FORCE_SHM": "1"})
        newest.warm(engine)
        move(newest, engine)
        for process in [] if newest.stock else [store, engine]:
            assert said(process, "MC_FORCE_SHM: Mooncake's shared-memory transport does not reach a store's segments")
        assert engine.call(actions.close) == 0
        end(newest, store)


# ---- MOONCAKE_STORE_BACKEND


def test_the_rust_store_is_refused_in_a_line(newest):
    """tidepool run starts nothing; a process that preloads the library by hand is told when it uses Mooncake's engine."""
    from harness import actions_engine
    from harness.wheels import TOOL

    if newest.stock:
        pytest.skip("Tidepool's line")
    done = subprocess.run(
        [TOOL, "run", "--store", newest.directory, "--segment", "memfd", "--", "true"],
        env={"PATH": "/usr/bin:/bin", "MOONCAKE_STORE_BACKEND": "rs"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 125 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert 'MOONCAKE_STORE_BACKEND: "rs" selects a store that Tidepool cannot serve' in line
    process = newest.process("engine", {**newest.engine_environment(), "MOONCAKE_STORE_BACKEND": "rs"})
    process.call(actions_engine.setup)
    assert len(process.warnings) == 1 and 'MOONCAKE_STORE_BACKEND: "rs"' in process.warnings[0]
