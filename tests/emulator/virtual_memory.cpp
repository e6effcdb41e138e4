// CUDA's virtual memory management with files in memory: what a process shares are descriptors.
#include "tests/emulator/virtual_memory.h"

#include <cuda.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <vector>

namespace cadre::emulator {
namespace {

constexpr size_t kPage = 64 << 10, kMostBytes = size_t(1) << 30;
constexpr uint8_t kPoison = 0xff;  // NaN in every float format

int file_of(CUmemGenericAllocationHandle handle) { return int(handle) - 1; }
CUmemGenericAllocationHandle handle_of(int file) { return CUmemGenericAllocationHandle(file) + 1; }
CUresult answer(bool good) { return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; }
void* address(CUdeviceptr at) { return reinterpret_cast<void*>(at); }

bool is_shared(const CUmemAllocationProp& of) {
  return of.type == CU_MEM_ALLOCATION_TYPE_PINNED &&
         of.requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR &&
         of.location.type == CU_MEM_LOCATION_TYPE_DEVICE && of.location.id == 0;
}

CUresult granularity(size_t* page, const CUmemAllocationProp* of,
                     CUmemAllocationGranularity_flags) {
  *page = kPage;
  return answer(is_shared(*of));
}

CUresult create(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* of,
                unsigned long long) {
  if (!is_shared(*of) || bytes == 0 || bytes % kPage != 0) return CUDA_ERROR_INVALID_VALUE;
  if (bytes > kMostBytes) return CUDA_ERROR_OUT_OF_MEMORY;
  const int file = memfd_create("emulated-gpu", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, off_t(bytes)) != 0) return CUDA_ERROR_OUT_OF_MEMORY;
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (data == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  std::memset(data, kPoison, bytes);
  munmap(data, bytes);
  *handle = handle_of(file);
  return CUDA_SUCCESS;
}

CUresult export_handle(void* to, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType,
                       unsigned long long) {
  const int file = dup(file_of(handle));
  std::memcpy(to, &file, sizeof file);
  return answer(file >= 0);
}

CUresult import_handle(CUmemGenericAllocationHandle* handle, void* descriptor,
                       CUmemAllocationHandleType) {
  const int file = dup(int(reinterpret_cast<intptr_t>(descriptor)));
  *handle = handle_of(file);
  return answer(file >= 0);
}

CUresult release(CUmemGenericAllocationHandle handle) {
  return answer(close(file_of(handle)) == 0);
}

CUresult reserve(CUdeviceptr* at, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  void* place = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  *at = reinterpret_cast<CUdeviceptr>(place);
  return answer(place != MAP_FAILED && bytes % kPage == 0);
}

/// What is mapped where, as the driver knows it, with a file of its own.
struct Mapped {
  CUdeviceptr at;
  size_t bytes;
  int file;
};
struct AllMapped {
  std::mutex mutex;
  std::vector<Mapped> list;

  static AllMapped& get() {
    static auto* const all = new AllMapped;  // windows may end after static objects do
    return *all;
  }
};

bool has_bytes(int file, size_t bytes) {
  struct stat facts {};
  return fstat(file, &facts) == 0 && size_t(facts.st_size) >= bytes;
}

CUresult map(CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
             unsigned long long) {
  const int file = file_of(handle);
  if (offset != 0 || !has_bytes(file, bytes)) return CUDA_ERROR_INVALID_VALUE;
  const void* mapped = mmap(address(at), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, file, 0);
  if (mapped == MAP_FAILED) return CUDA_ERROR_INVALID_VALUE;
  AllMapped& all = AllMapped::get();
  const std::lock_guard lock(all.mutex);
  all.list.push_back({at, bytes, dup(file)});
  return answer(all.list.back().file >= 0);
}

/// What `use` makes of the mapping in which an address lies.
template <class Use>
CUresult with_mapping(CUdeviceptr anywhere, Use&& use) {
  AllMapped& all = AllMapped::get();
  const std::lock_guard lock(all.mutex);
  for (const Mapped& one : all.list)
    if (anywhere - one.at < one.bytes) return use(one);
  return CUDA_ERROR_INVALID_VALUE;
}

CUresult retain(CUmemGenericAllocationHandle* handle, void* anywhere) {
  return with_mapping(reinterpret_cast<CUdeviceptr>(anywhere), [&](const Mapped& mapped) {
    const int file = dup(mapped.file);
    *handle = handle_of(file);
    return answer(file >= 0);
  });
}

CUresult attribute(void* to, CUpointer_attribute which, CUdeviceptr anywhere) {
  if (which != CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR) return CUDA_ERROR_INVALID_VALUE;
  return with_mapping(anywhere, [&](const Mapped& mapped) {
    std::memcpy(to, &mapped.at, sizeof mapped.at);
    return CUDA_SUCCESS;
  });
}

CUresult set_access(CUdeviceptr at, size_t bytes, const CUmemAccessDesc* of, size_t count) {
  const bool good = count == 1 && of->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  return answer(good && mprotect(address(at), bytes, PROT_READ | PROT_WRITE) == 0);
}

CUresult unmap(CUdeviceptr at, size_t bytes) {
  AllMapped& all = AllMapped::get();
  const std::lock_guard lock(all.mutex);
  const auto found = std::find_if(all.list.begin(), all.list.end(), [&](const Mapped& one) {
    return one.at == at && one.bytes == bytes;
  });
  if (found == all.list.end()) return CUDA_ERROR_INVALID_VALUE;
  close(found->file);
  all.list.erase(found);
  constexpr int kNowhere = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  return answer(mmap(address(at), bytes, PROT_NONE, kNowhere, -1, 0) != MAP_FAILED);
}

CUresult free_addresses(CUdeviceptr at, size_t bytes) {
  return answer(munmap(address(at), bytes) == 0);
}

struct Entry {
  const char* name;
  void* function;
};
template <class Function>
Entry entry(const char* name, Function* function) {
  return {name, reinterpret_cast<void*>(function)};
}

}  // namespace

void* virtual_memory_entry(const char* name) {
  const Entry entries[] = {entry("cuMemGetAllocationGranularity", granularity),
                           entry("cuMemCreate", create),
                           entry("cuMemExportToShareableHandle", export_handle),
                           entry("cuMemImportFromShareableHandle", import_handle),
                           entry("cuMemRelease", release),
                           entry("cuMemRetainAllocationHandle", retain),
                           entry("cuPointerGetAttribute", attribute),
                           entry("cuMemAddressReserve", reserve),
                           entry("cuMemMap", map),
                           entry("cuMemSetAccess", set_access),
                           entry("cuMemUnmap", unmap),
                           entry("cuMemAddressFree", free_addresses)};
  for (const Entry& one : entries)
    if (std::strcmp(one.name, name) == 0) return one.function;
  return nullptr;
}

}  // namespace cadre::emulator
