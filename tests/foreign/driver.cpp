// Calls the functions of a library for another process, whose memory lies at the same address here: what it asks for comes on standard input.
//
//   driver LIBRARY FILE BEGIN SIZE   the memory's file, where it begins, and its bytes
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#ifdef _WIN32
#include <fcntl.h>
#include <io.h>
#include <windows.h>
#else
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif

struct Request {
  char function[32];
  char real[16];      // which arguments are not whole numbers or addresses
  int64_t given[12];  // a float32 in the lower half
};

template <class To>
To bits(int64_t from) {
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

#ifdef _WIN32
// An argument's place says which register it comes in. Of those that are not declared a real number comes in both that it may be in, and so does
// whatever is taken for one. No function begins with a real number.
using Function = int64_t (*)(int64_t, ...);

int64_t call(void* function, const Request& r) {
  const int64_t* g = r.given;
  return reinterpret_cast<Function>(function)(g[0], bits<double>(g[1]), bits<double>(g[2]), bits<double>(g[3]), g[4], g[5], g[6], g[7], g[8], g[9],
                                              g[10], g[11]);
}

bool share(const char* file, void* at, size_t) {
  const HANDLE opened = CreateFileA(file, GENERIC_READ | GENERIC_WRITE, FILE_SHARE_READ | FILE_SHARE_WRITE, nullptr, OPEN_EXISTING, 0, nullptr);
  const HANDLE mapping = CreateFileMappingA(opened, nullptr, PAGE_READWRITE, 0, 0, nullptr);
  _setmode(0, _O_BINARY), _setmode(1, _O_BINARY);
  return MapViewOfFileEx(mapping, FILE_MAP_ALL_ACCESS, 0, 0, 0, at) == at;
}

void* load(const char* library) { return LoadLibraryA(library); }
void* find(void* library, const char* name) { return reinterpret_cast<void*>(GetProcAddress(HMODULE(library), name)); }
#else
// The two kinds of arguments come in registers of their own, and what a function doesn't take it doesn't see.
using Function = int64_t (*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, double,
                             double, double, double, double, double, double, double);

int64_t call(void* function, const Request& r) {
  int64_t w[12] = {};
  double d[12] = {};
  for (int i = 0, whole = 0, real = 0; i < 12; ++i)
    if (r.real[i]) d[real++] = bits<double>(r.given[i]);
    else w[whole++] = r.given[i];
  return reinterpret_cast<Function>(function)(w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], w[8], w[9], w[10], w[11], d[0], d[1], d[2], d[3], d[4],
                                              d[5], d[6], d[7]);
}

bool share(const char* file, void* at, size_t size) {
  return mmap(at, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED_NOREPLACE | MAP_NORESERVE, open(file, O_RDWR), 0) == at;
}

void* load(const char* library) { return dlopen(library, RTLD_NOW); }
void* find(void* library, const char* name) { return dlsym(library, name); }
#endif

int main(int, char** arguments) {
#ifdef _OPENMP
  omp_set_num_threads(2);
#endif
  if (!share(arguments[2], reinterpret_cast<void*>(strtoull(arguments[3], nullptr, 10)), strtoull(arguments[4], nullptr, 10))) {
    fprintf(stderr, "the memory can't be shared\n");
    return 1;
  }
  void* library = load(arguments[1]);
  if (!library) {
    fprintf(stderr, "%s can't be loaded\n", arguments[1]);
    return 1;
  }
  for (Request r; fread(&r, sizeof r, 1, stdin) == 1;) {
    void* function = find(library, r.function);
    if (!function) {
      fprintf(stderr, "no function %s\n", r.function);
      return 1;
    }
    const int64_t result = call(function, r);
    fwrite(&result, sizeof result, 1, stdout);
    fflush(stdout);
  }
}
