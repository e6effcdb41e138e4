#include "cuda/parallel/rank_memory.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <bit>

#include "cuda/check.h"

namespace cadre::cuda {
namespace {

/// The driver's function of that name, asked of the runtime, so that the library needs no driver to
/// link.
template <class Function>
Function* driver_function(const char* name) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found{};
  check(cudaGetDriverEntryPointByVersion(name, &entry, 12000, cudaEnableDefault, &found),
        text("find ", name));
  if (found != cudaDriverEntryPointSuccess)
    throw DeviceError(text("cuda: the driver has no ", name, "; it must be of CUDA 12 or newer"));
  return reinterpret_cast<Function*>(entry);
}

struct Driver {
  decltype(cuMemGetAllocationGranularity)* granularity =
      driver_function<decltype(cuMemGetAllocationGranularity)>("cuMemGetAllocationGranularity");
  decltype(cuMemCreate)* create = driver_function<decltype(cuMemCreate)>("cuMemCreate");
  decltype(cuMemRelease)* release = driver_function<decltype(cuMemRelease)>("cuMemRelease");
  decltype(cuMemExportToShareableHandle)* export_handle =
      driver_function<decltype(cuMemExportToShareableHandle)>("cuMemExportToShareableHandle");
  decltype(cuMemImportFromShareableHandle)* import_handle =
      driver_function<decltype(cuMemImportFromShareableHandle)>("cuMemImportFromShareableHandle");
  decltype(cuMemRetainAllocationHandle)* retain =
      driver_function<decltype(cuMemRetainAllocationHandle)>("cuMemRetainAllocationHandle");
  decltype(cuPointerGetAttribute)* attribute =
      driver_function<decltype(cuPointerGetAttribute)>("cuPointerGetAttribute");
  decltype(cuMemAddressReserve)* reserve =
      driver_function<decltype(cuMemAddressReserve)>("cuMemAddressReserve");
  decltype(cuMemAddressFree)* free =
      driver_function<decltype(cuMemAddressFree)>("cuMemAddressFree");
  decltype(cuMemMap)* map = driver_function<decltype(cuMemMap)>("cuMemMap");
  decltype(cuMemUnmap)* unmap = driver_function<decltype(cuMemUnmap)>("cuMemUnmap");
  decltype(cuMemSetAccess)* set_access =
      driver_function<decltype(cuMemSetAccess)>("cuMemSetAccess");
};

const Driver& driver() {
  static const Driver functions;
  return functions;
}

void demand(CUresult code, std::string_view what) {
  if (code != CUDA_SUCCESS)
    throw DeviceError(text("window: cannot ", what, ": the driver says ", int(code)));
}

CUmemAllocationProp properties(int device) {
  CUmemAllocationProp made{};
  made.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  made.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  made.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  made.location.id = device;
  return made;
}

/// Memory, as long as it is not mapped.
class Allocation {
 public:
  explicit Allocation(CUmemGenericAllocationHandle handle) : handle_(handle) {}
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;
  ~Allocation() { driver().release(handle_); }

  CUmemGenericAllocationHandle get() const { return handle_; }

 private:
  CUmemGenericAllocationHandle handle_;
};

/// How far behind the first byte of its mapping an address lies; 0 where the driver does not know.
int64_t offset_in_allocation(const void* address) {
  const auto at = std::bit_cast<CUdeviceptr>(address);
  CUdeviceptr first = at;
  if (driver().attribute(&first, CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR, at) != CUDA_SUCCESS)
    return 0;
  return int64_t(at - first);
}

}  // namespace

int64_t RankMemory::whole_pages(int64_t bytes, int device) {
  const CUmemAllocationProp of = properties(device);
  size_t page = 0;
  demand(driver().granularity(&page, &of, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
         "ask for the pages of a GPU");
  return (bytes + int64_t(page) - 1) / int64_t(page) * int64_t(page);
}

parallel::File RankMemory::make(int64_t bytes, int device) {
  const CUmemAllocationProp of = properties(device);
  CUmemGenericAllocationHandle handle{};
  demand(driver().create(&handle, size_t(bytes), &of, 0),
         text("make ", bytes, " bytes of memory of a GPU"));
  const Allocation made(handle);
  int descriptor = -1;
  demand(driver().export_handle(&descriptor, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
         "share memory of a GPU");
  return parallel::File(descriptor);
}

void RankMemory::reserve(size_t ranks, int64_t bytes_each) {
  bytes_each_ = bytes_each;
  bytes_ = int64_t(ranks) * bytes_each;
  CUdeviceptr place = 0;
  demand(driver().reserve(&place, size_t(bytes_), 0, 0, 0),
         "reserve addresses for the windows of all ranks");
  place_ = place;
}

void RankMemory::map_next(uint64_t memory, int device) {
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = device;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  const int64_t rank = mapped_ / bytes_each_;
  const CUdeviceptr at = CUdeviceptr(place_) + CUdeviceptr(mapped_);
  demand(driver().map(at, size_t(bytes_each_), 0, memory, 0),
         text("map ", bytes_each_, " bytes of the memory of rank ", rank));
  mapped_ += bytes_each_;
  demand(
      driver().set_access(at, size_t(bytes_each_), &access, 1),
      text("reach the memory of rank ", rank, " from GPU ", device, ", which wants peer access"));
}

char* RankMemory::map(std::span<const parallel::File> files, int64_t bytes_each, int device) {
  reserve(files.size(), bytes_each);
  for (size_t rank = 0; rank < files.size(); ++rank) {
    CUmemGenericAllocationHandle handle{};
    demand(driver().import_handle(&handle, std::bit_cast<void*>(intptr_t(files[rank].get())),
                                  CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
           text("take the memory of rank ", rank));
    const Allocation taken(handle);
    map_next(handle, device);
  }
  return std::bit_cast<char*>(place_);
}

char* RankMemory::map_again(const std::vector<void*>& addresses, int64_t bytes, int device) {
  const int64_t offset = offset_in_allocation(addresses[0]);
  require(offset % parallel::kAlignment == 0, "the memory of rank 0 begins ", offset,
          " bytes within its allocation, must begin a multiple of ", parallel::kAlignment);
  reserve(addresses.size(), whole_pages(offset + bytes, device));
  for (size_t rank = 0; rank < addresses.size(); ++rank) {
    const int64_t own = offset_in_allocation(addresses[rank]);
    require(own == offset, "the memory of rank ", rank, " begins ", own,
            " bytes within its allocation, must begin ", offset, " as that of rank 0 does");
    CUmemGenericAllocationHandle handle{};
    demand(driver().retain(&handle, addresses[rank]),
           text("take the memory of rank ", rank, ", which must be CUDA's virtual memory"));
    const Allocation taken(handle);
    map_next(handle, device);
  }
  return std::bit_cast<char*>(place_) + offset;
}

RankMemory::~RankMemory() {
  if (place_ == 0) return;
  for (int64_t at = 0; at < mapped_; at += bytes_each_)
    driver().unmap(CUdeviceptr(place_) + CUdeviceptr(at), size_t(bytes_each_));
  driver().free(CUdeviceptr(place_), size_t(bytes_));
}

}  // namespace cadre::cuda
