"""The functions of c_api.h, loaded from libcadre_bench_c.so; no package beside Python is needed."""
import ctypes


class Args(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in
                ("lhs", "rhs", "offsets", "out", "workspace", "lhs_scales", "rhs_scales")]


class Library:
    def __init__(self, path):
        self.c = ctypes.CDLL(path)
        self.c.cadre_gemm_plan.restype = ctypes.c_void_p
        self.c.cadre_gemm_plan.argtypes = [ctypes.c_char_p] * 3
        self.c.cadre_gemm_free.argtypes = [ctypes.c_void_p]
        self.c.cadre_gemm_name.restype = ctypes.c_char_p
        self.c.cadre_gemm_name.argtypes = [ctypes.c_void_p]
        self.c.cadre_gemm_workspace_bytes.restype = ctypes.c_longlong
        self.c.cadre_gemm_workspace_bytes.argtypes = [ctypes.c_void_p]
        self.c.cadre_gemm_run.argtypes = [ctypes.c_void_p, ctypes.POINTER(Args), ctypes.c_void_p]
        self.c.cadre_gemm_error.restype = ctypes.c_char_p

    def error(self):
        return RuntimeError(self.c.cadre_gemm_error().decode())


class Gemm:
    """A planned grouped GEMM, by the implementation `only` if one is named."""

    def __init__(self, library, problem, device, only=None):
        self.library = library
        self.plan = library.c.cadre_gemm_plan(problem.encode(), device.encode(),
                                              only.encode() if only else None)
        if not self.plan:
            raise library.error()

    def __del__(self):
        if self.plan:
            self.library.c.cadre_gemm_free(self.plan)

    @property
    def name(self):
        return self.library.c.cadre_gemm_name(self.plan).decode()

    @property
    def workspace_bytes(self):
        return self.library.c.cadre_gemm_workspace_bytes(self.plan)

    def run(self, args, stream=None):
        """`args` is an Args of addresses."""
        if self.library.c.cadre_gemm_run(self.plan, ctypes.byref(args), stream):
            raise self.library.error()
