// Calls the functions of a library for another process, whose memory lies at the same address here: what it asks for comes on standard input.
//
//   driver LIBRARY FILE BEGIN SIZE   the memory's file, where it begins, and its bytes
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#ifdef _OPENMP
#include <omp.h>
#endif

struct Request {
  char function[32];
  int64_t whole[12];  // whole numbers and addresses, in their order
  double real[8];     // the others; a float32 in the lower half
};

// On ARM64 the two kinds of arguments come in registers of their own, and what a function doesn't take it doesn't see.
using Function = int64_t (*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, double,
                             double, double, double, double, double, double, double);

int main(int, char** arguments) {
#ifdef _OPENMP
  omp_set_num_threads(2);
#endif
  void* at = reinterpret_cast<void*>(strtoull(arguments[3], nullptr, 10));
  const size_t size = strtoull(arguments[4], nullptr, 10);
  if (mmap(at, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED_NOREPLACE | MAP_NORESERVE, atoi(arguments[2]), 0) != at) {
    perror("the memory can't be shared");
    return 1;
  }
  void* library = dlopen(arguments[1], RTLD_NOW);
  if (!library) {
    fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  for (Request r; fread(&r, sizeof r, 1, stdin) == 1;) {
    const Function function = reinterpret_cast<Function>(dlsym(library, r.function));
    if (!function) {
      fprintf(stderr, "no function %s\n", r.function);
      return 1;
    }
    const int64_t *w = r.whole, result = function(w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], w[8], w[9], w[10], w[11], r.real[0], r.real[1],
                                                  r.real[2], r.real[3], r.real[4], r.real[5], r.real[6], r.real[7]);
    fwrite(&result, sizeof result, 1, stdout);
    fflush(stdout);
  }
}
