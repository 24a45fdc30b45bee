"""Sources of CUDA kernels, compiled for the host: what g++ needs before them, and a kernel that runs there."""

import ctypes

BEFORE = """
#include <cmath>
#include <cstring>
#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(threads)
#define __grid_constant__
using std::exp, std::log, std::fabs, std::fmax;
static struct { int x; } threadIdx, blockIdx;
inline void __syncwarp() {}
inline float __int_as_float(unsigned bits) { float number; std::memcpy(&number, &bits, 4); return number; }
template <class T> T __ldg(const T* number) { return *number; }
"""


class Host:
    """A kernel whose blocks run one after the other, each of the number of threads it was compiled for."""

    def __init__(self, library, threads=1):
        self.library, self.threads = library, threads

    def launch(self, blocks, threads, argument):
        assert threads == self.threads
        self.library.run(blocks, ctypes.c_void_p(argument))
        return True
