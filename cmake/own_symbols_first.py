"""`own_symbols_first.py SOURCE COPY`: copies a shared library, so marked that the dynamic linker
looks for the copy's symbols in the copy first, as `ld -Bsymbolic` would have marked it.

Else the definitions of whoever was loaded before it into the global scope replace the library's own
weak ones, whatever the order of linking.
"""

import pathlib
import struct
import sys

PT_DYNAMIC, DT_NULL, DT_FLAGS, DF_SYMBOLIC = 2, 0, 30, 2


def mark(elf: bytearray) -> None:
    """Errors: SystemExit for what is no 64-bit little-endian ELF file with a place for flags."""
    if elf[:6] != b"\x7fELF\x02\x01":
        sys.exit("own_symbols_first: source is no 64-bit little-endian ELF file, must be one")
    (headers,) = struct.unpack_from("<Q", elf, 32)
    size, count = struct.unpack_from("<HH", elf, 54)
    for at in range(headers, headers + size * count, size):
        kind, _, begin, _, _, length = struct.unpack_from("<IIQQQQ", elf, at)
        if kind == PT_DYNAMIC:
            break
    else:
        sys.exit("own_symbols_first: source has no dynamic section, must have one")
    entries = range(begin, begin + length, 16)
    tags = [struct.unpack_from("<Q", elf, at)[0] for at in entries]
    flags = tags.index(DT_FLAGS) if DT_FLAGS in tags else tags.index(DT_NULL)
    if tags[flags] == DT_NULL and flags + 1 == len(tags):  # the one that ends the section
        sys.exit("own_symbols_first: source has no place for flags, must have DT_FLAGS or a spare")
    (value,) = struct.unpack_from("<Q", elf, entries[flags] + 8)
    struct.pack_into("<QQ", elf, entries[flags], DT_FLAGS, value | DF_SYMBOLIC)


source, copy = map(pathlib.Path, sys.argv[1:])
content = bytearray(source.read_bytes())
mark(content)
copy.write_bytes(content)
