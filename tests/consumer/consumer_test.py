"""Builds the consumer's project as a user would and runs it.

`consumer_test.py WAY SOURCE BUILD SCRATCH` with WAY one of
  headers        every installed header compiles on its own, in strict C++20
  find_package   against the tree that `cmake --install BUILD` writes, moved elsewhere
  pkg_config     the same tree, by `pkg-config --cflags --libs` and one call of the compiler
  shared         a shared library built anew, found by find_package, that exports what is declared
  fetch_content  the sources, through FetchContent
  no_onednn      a library built anew with CADRE_ONEDNN=OFF where there is none, by pkg-config
  which_onednn   configuring says which oneDNN it wants
  which_nccl     configuring says which NCCL it wants, and that it wants CUDA
"""
import os
import pathlib
import re
import shutil
import subprocess
import sys

# Row 0 by expert 0, rows 1 to 3 by expert 2, and two rows that nobody may touch.
WANT = "3 12\n39 48\n39 48\n39 48\n-1 -1\n-1 -1\n"

# The flags of the build that is tested, beside which SCRATCH lies: so the compiler's cache has the
# objects of the library.
FLAGS = ("-DCMAKE_BUILD_TYPE=Release", "-DCADRE_WERROR=ON")


def call(*command, **options):
    print("$", *command, flush=True)
    options = {"check": True, "text": True} | options
    return subprocess.run([str(c) for c in command], **options)


def build_and_run(project, folder, *options):
    call("cmake", "-G", "Ninja", "-S", project, "-B", folder, *FLAGS, *options)
    call("cmake", "--build", folder)
    check_output(folder / "consumer")


def check_output(program):
    got = call(program, stdout=subprocess.PIPE).stdout
    print(got)
    if WANT not in got:
        sys.exit(f"the consumer printed {got!r}, must contain {WANT!r}")


def installed(build, scratch):
    """Installs and then moves the tree, so that no path of the build can be left in it."""
    call("cmake", "--install", build, "--prefix", scratch / "first", stdout=subprocess.DEVNULL)
    shutil.move(scratch / "first", scratch / "tree")
    return scratch / "tree"


def headers(project, source, build, scratch):
    tree = installed(build, scratch)
    found = sorted((tree / "include").rglob("*.h"))
    assert len(found) == len(list((source / "include").rglob("*.h"))) > 0
    for header in found:
        call("g++", "-std=c++20", "-pedantic-errors", "-Wall", "-Wextra", "-Wshadow", "-Werror",
             "-fsyntax-only", "-x", "c++", f"-I{tree}/include", "-include", header, "/dev/null")


def find_package(project, source, build, scratch):
    build_and_run(project, scratch / "build", f"-DCMAKE_PREFIX_PATH={installed(build, scratch)}")


def flags_of(tree):
    places = ":".join(str(p.parent) for p in tree.rglob("cadre.pc"))
    return call("pkg-config", "--cflags", "--libs", "cadre", stdout=subprocess.PIPE,
                env=os.environ | {"PKG_CONFIG_PATH": places}).stdout.split()


def pkg_config(project, source, build, scratch):
    flags = flags_of(installed(build, scratch))
    call("g++", project / "main.cpp", *flags, "-o", scratch / "consumer")
    check_output(scratch / "consumer")


def exported(library):
    """Pairs of kind and name, such as ("T", "cadre::plan"), without parameters."""
    lines = call("nm", "-DC", "--defined-only", library, stdout=subprocess.PIPE).stdout.splitlines()
    pairs = [line.split(" ", 2)[1:] for line in lines]
    return [(kind, re.sub(r"\[abi:\w+\]|\(.*", "", name)) for kind, name in pairs]


def without_attributes(text):
    return re.sub(r"\[\[.*?\]\]", "", text)


def declared_functions(headers):
    """Names of the functions that the library is to define; those of types begin with a capital."""
    sys.path.insert(0, str(headers.parent.parent / "tools"))
    import cpp_scan
    found = {f.name for header in headers.glob("*.h")
             for f in cpp_scan.Source(without_attributes(header.read_text())).functions
             if not f.body}
    return {name for name in found if name[0].islower() and name != "operator"}


def check_exports(library, headers):
    """Functions are exactly those that are declared; classes and constants are in headers too."""
    text = "".join(header.read_text() for header in headers.glob("*.h"))
    symbols = exported(library)
    print(f"{len(symbols)} symbols are exported")
    public = re.compile(r"(typeinfo for |typeinfo name for |vtable for )?cadre::([A-Z]\w*::)?"
                        r"~?(\w+)=?")
    names = {name: public.fullmatch(name) for _, name in symbols}
    others = {name for name, match in names.items()
              if not match or not re.search(rf"\b{match[3]}\b", text)}
    functions = {names[name][3] for kind, name in symbols if kind == "T" and name not in others}
    functions = {name for name in functions if name[0].islower() and name != "operator"}
    want = declared_functions(headers)
    if others or not want or functions != want:
        sys.exit(f"exported, and not declared: {sorted(others | functions - want)}; declared, and "
                 f"not exported: {sorted(want - functions)}")


def configure(source, scratch, *options, **more):
    """The library alone."""
    return call("cmake", "-G", "Ninja", "-S", source, "-B", scratch, "-DCADRE_TESTS=OFF",
                "-DCADRE_CLI=OFF", "-DCADRE_TORCH=OFF", *options, *FLAGS, **more)


def built(source, scratch, *options):
    """The installed tree of a library built anew."""
    configure(source, scratch, *options)
    call("cmake", "--build", scratch)
    return installed(scratch, scratch)


NO_ONEDNN = ("-DCMAKE_DISABLE_FIND_PACKAGE_dnnl=ON", "-DCMAKE_DISABLE_FIND_PACKAGE_OpenCL=ON")
REFUSALS = """
#include <cadre/cadre.h>
#include <iostream>
int main() {
  const auto p = cadre::parse_grouped_gemm_problem("grouped_gemm wgrad R=9 N=8 K=7 E=3 format=f32");
  const auto made = cadre::plan(p, cadre::this_cpu());
  for (const auto& [who, why] : made.refusals) std::cout << who << ": " << why << "\\n";
  std::cout << made.name << "\\n";
}
"""


def no_onednn(project, source, build, scratch):
    flags = flags_of(built(source, scratch, "-DCADRE_ONEDNN=OFF", *NO_ONEDNN))
    assert "dnnl" not in " ".join(flags), flags
    call("g++", project / "main.cpp", *flags, "-o", scratch / "consumer")
    check_output(scratch / "consumer")
    (scratch / "refusals.cpp").write_text(REFUSALS)
    call("g++", scratch / "refusals.cpp", *flags, "-o", scratch / "refusals")
    got = call(scratch / "refusals", stdout=subprocess.PIPE).stdout
    assert "cpu_onednn: this build has no oneDNN\n" in got, got
    assert got.endswith("cpu_portable\n"), got
    linked = call("ldd", scratch / "refusals", stdout=subprocess.PIPE).stdout
    assert "dnnl" not in linked and "OpenCL" not in linked, linked


def which_onednn(project, source, build, scratch):
    package = scratch / "package"
    package.mkdir()
    version = ('set(PACKAGE_VERSION "{}")\nset(PACKAGE_VERSION_COMPATIBLE TRUE)\n'
               'set(PACKAGE_VERSION_EXACT TRUE)\n')
    wrong = "must be 2.6 or later and before 4"
    cases = (("1.8.1", "OMP", f"oneDNN is 1.8.1, {wrong}"),
             ("4.0.0", "OMP", f"oneDNN is 4.0.0, {wrong}"),
             ("3.5.0", "TBB", "the threads of oneDNN are TBB's, must be OMP's"),
             (None, None, "oneDNN is missing"))
    for number, runtime, says in cases:
        (package / "dnnl-config.cmake").write_text(f'set(DNNL_CPU_RUNTIME "{runtime}")\n')
        (package / "dnnl-config-version.cmake").write_text(version.format(number))
        options = NO_ONEDNN if number is None else (f"-Ddnnl_DIR={package}",)
        done = configure(source, scratch / "build", *options, check=False, capture_output=True)
        said = " ".join(done.stderr.split())
        assert done.returncode and f"cadre: {says}" in said, said
        assert "-DCADRE_ONEDNN=OFF" in said, said


def which_nccl(project, source, build, scratch):
    def says(words, done):
        said = " ".join(done.stderr.split())
        assert done.returncode and words in said, said

    says("cadre: CADRE_NCCL is ON, must be OFF without CADRE_CUDA",
         configure(source, scratch / "build", "-DCADRE_NCCL=ON", check=False, capture_output=True))
    (scratch / "nccl.h").write_text("#define NCCL_MAJOR 2\n#define NCCL_MINOR 12\n"
                                    "#define NCCL_PATCH 9\n")
    for folder, words in (("", "cadre: NCCL is missing"),
                          (scratch, "cadre: NCCL is 2.12.9, must be 2.13 or later")):
        says(words, call("cmake", f"-DNCCL_INCLUDE_DIR={folder}", "-DNCCL_LIBRARY=nccl", "-P",
                         source / "cmake/FindNccl.cmake", check=False, capture_output=True))


def shared(project, source, build, scratch):
    tree = built(source, scratch, "-DBUILD_SHARED_LIBS=ON")
    build_and_run(project, scratch / "build", f"-DCMAKE_PREFIX_PATH={tree}")
    linked = call("ldd", scratch / "build/consumer", stdout=subprocess.PIPE).stdout
    assert str(tree) in linked, linked
    (library,) = [path for path in tree.rglob("libcadre.so*") if not path.is_symlink()]
    check_exports(library, source / "include/cadre")


def fetch_content(project, source, build, scratch):
    build_and_run(project, scratch, f"-DCADRE_SOURCE={source}")


def main(way, source, build, scratch):
    scratch = pathlib.Path(scratch)
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    project = pathlib.Path(__file__).parent
    ways = {w.__name__: w for w in (headers, find_package, pkg_config, shared, fetch_content,
                                    no_onednn, which_onednn, which_nccl)}
    ways[way](project, pathlib.Path(source), pathlib.Path(build), scratch)
    shutil.rmtree(scratch)


if __name__ == "__main__":
    main(*sys.argv[1:])
