// malloc and its kin for a process whose memory another process shares: all of it lies in one file, at one address in both. To be preloaded.
#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

constexpr uintptr_t BEGIN = 0x100000000000, SIZE = uintptr_t(1) << 33;  // Wine maps no file that is larger than the memory
constexpr size_t CLASSES = 4 * 40;  // sizes of blocks, four to a doubling

struct Header {  // before what is given out
  size_t kind;
  char* block;
};
struct Free {
  Free* next;
};

std::atomic_flag locked = ATOMIC_FLAG_INIT;
Free* freed[CLASSES];
uintptr_t unused;
int file = -1;

size_t bytes_of(size_t kind) { return size_t(4 + kind % 4) << (kind / 4 + 4); }

char* take(size_t kind) {
  while (locked.test_and_set(std::memory_order_acquire)) {}
  if (!unused) {
    file = memfd_create("shared", 0);
    void* at = reinterpret_cast<void*>(BEGIN);
    if (ftruncate(file, SIZE) || mmap(at, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED_NOREPLACE | MAP_NORESERVE, file, 0) != at) _exit(99);
    unused = BEGIN;
  }
  char* block = reinterpret_cast<char*>(freed[kind]);
  if (block) freed[kind] = freed[kind]->next;
  else block = reinterpret_cast<char*>(unused), unused += bytes_of(kind);
  locked.clear(std::memory_order_release);
  return unused > BEGIN + SIZE ? nullptr : block;
}

Header* header(void* given) { return static_cast<Header*>(given) - 1; }
bool ours(void* given) { return uintptr_t(given) >= BEGIN && uintptr_t(given) < BEGIN + SIZE; }

void* give(size_t alignment, size_t size) {
  const size_t least = size + sizeof(Header) + (alignment > 16 ? alignment : 0);
  size_t kind = 0;
  while (kind < CLASSES && bytes_of(kind) < least) ++kind;
  char* block = kind < CLASSES ? take(kind) : nullptr;
  if (!block) {
    errno = ENOMEM;
    return nullptr;
  }
  const uintptr_t after = uintptr_t(block) + sizeof(Header), mask = (alignment > 16 ? alignment : 16) - 1;
  void* given = reinterpret_cast<void*>((after + mask) & ~mask);
  *header(given) = {kind, block};
  return given;
}

}  // namespace

extern "C" {

int shared_file() { return file; }

void* malloc(size_t size) { return give(16, size); }
void* memalign(size_t alignment, size_t size) { return give(alignment, size); }
void* aligned_alloc(size_t alignment, size_t size) { return give(alignment, size); }
int posix_memalign(void** to, size_t alignment, size_t size) {
  *to = give(alignment, size);
  return *to ? 0 : ENOMEM;
}
void* calloc(size_t count, size_t size) {
  void* given = size && count > SIZE / size ? nullptr : give(16, count * size);
  return given ? memset(given, 0, count * size) : nullptr;
}
void free(void* given) {
  if (!ours(given)) return;
  const Header of = *header(given);
  Free* block = reinterpret_cast<Free*>(of.block);
  while (locked.test_and_set(std::memory_order_acquire)) {}
  block->next = freed[of.kind], freed[of.kind] = block;
  locked.clear(std::memory_order_release);
}
size_t malloc_usable_size(void* given) {
  return ours(given) ? size_t(header(given)->block + bytes_of(header(given)->kind) - static_cast<char*>(given)) : 0;
}
void* realloc(void* given, size_t size) {
  if (!given) return malloc(size);
  const size_t had = malloc_usable_size(given);
  if (size <= had && size > had / 2) return given;
  void* other = malloc(size);
  if (other) memcpy(other, given, had < size ? had : size), free(given);
  return other;
}

}  // extern "C"
