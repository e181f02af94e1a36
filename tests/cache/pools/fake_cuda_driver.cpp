// The calls of the CUDA driver that map memory, over memory of the host. What NVIDIA's driver refuses is refused with
// the same numbers; addresses without memory, or without access, end the process that touches them. New memory is
// full of ones, which is no number in any type of floats: the driver promises no zeros either.

#include <cstdint>
#include <cstring>
#include <fcntl.h>
#include <map>
#include <mutex>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

namespace {

enum Result { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101 };

struct Location { int type, id; };
struct Properties {
    int type, handle_types;
    Location location;
    void *win32_data;
    unsigned char compression, rdma;
    unsigned short usage;
    unsigned char reserved[4];
};
struct Access { Location location; int flags; };
static_assert(sizeof(Properties) == 32 && sizeof(Access) == 12, "as in cuda.h");

struct Chunk { uint64_t size, offset; int num_mappings; bool is_released; };
struct Mapping { uint64_t size, handle; };

std::mutex guard;
bool is_initialized = false;
int is_able = 1, file = -1;
uint64_t granularity = 1 << 21, most_bytes = UINT64_MAX, num_bytes = 0, next_handle = 1;
std::map<uint64_t, uint64_t> reserved, holes;  // address: size; offset in the file: size
std::map<uint64_t, Chunk> chunks;              // by handle
std::map<uint64_t, Mapping> mapped;            // by address

bool is_whole(uint64_t number) { return number % granularity == 0; }

bool is_reserved(uint64_t address, uint64_t size) {
    auto next = reserved.upper_bound(address);
    if (next == reserved.begin()) return false;
    auto [begin, length] = *--next;
    return address + size <= begin + length;
}

// Whether a range is made of whole mappings, with nothing between them.
bool is_mapped(uint64_t address, uint64_t size) {
    for (uint64_t at = address; at < address + size;) {
        auto found = mapped.find(at);
        if (found == mapped.end()) return false;
        at += found->second.size;
        if (at > address + size) return false;
    }
    return size > 0;
}

bool is_ours(const Properties *p) {
    return p->type == 1 && !p->handle_types && p->location.type == 1 && !p->location.id && !p->win32_data &&
           !p->compression && !p->rdma && !p->usage;
}

void end_chunk(uint64_t handle) {
    Chunk &chunk = chunks[handle];
    if (chunk.num_mappings || !chunk.is_released) return;
    fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, chunk.offset, chunk.size);
    holes[chunk.offset] = chunk.size;
    num_bytes -= chunk.size;
    chunks.erase(handle);
}

}  // namespace

extern "C" {

// Begin anew: `size` bytes are one unit of memory, and there are `most` bytes in all.
void fake_set(uint64_t size, uint64_t most, int able) {
    granularity = size, most_bytes = most, is_able = able, is_initialized = false;
}

void fake_count(uint64_t *counts) {
    counts[0] = reserved.size(), counts[1] = chunks.size(), counts[2] = mapped.size();
}

int cuInit(unsigned flags) {
    if (flags) return INVALID_VALUE;
    if (file < 0) file = memfd_create("chunks", MFD_CLOEXEC);
    is_initialized = true;
    return SUCCESS;
}

int cuDeviceGet(int *device, int ordinal) {
    if (!is_initialized) return NOT_INITIALIZED;
    if (ordinal) return INVALID_DEVICE;
    return *device = 0, SUCCESS;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    if (device) return INVALID_DEVICE;
    if (attribute != 102) return INVALID_VALUE;
    return *value = is_able, SUCCESS;
}

int cuMemGetAllocationGranularity(size_t *size, const Properties *p, int option) {
    if (!is_ours(p) || option < 0 || option > 1) return INVALID_VALUE;
    return *size = granularity, SUCCESS;
}

int cuMemAddressReserve(uint64_t *address, size_t size, size_t alignment, uint64_t, uint64_t flags) {
    std::lock_guard lock(guard);
    if (!is_initialized) return NOT_INITIALIZED;
    if (!size || !is_whole(size) || flags || (alignment & (alignment - 1))) return INVALID_VALUE;
    int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    char *memory = static_cast<char *>(mmap(nullptr, size + granularity, PROT_NONE, kind, -1, 0));
    if (memory == MAP_FAILED) return OUT_OF_MEMORY;
    uint64_t begin = reinterpret_cast<uint64_t>(memory), first = (begin + granularity - 1) / granularity * granularity;
    if (first > begin) munmap(memory, first - begin);
    if (begin + granularity > first) munmap(reinterpret_cast<void *>(first + size), begin + granularity - first);
    reserved[*address = first] = size;
    return SUCCESS;
}

int cuMemAddressFree(uint64_t address, size_t size) {
    std::lock_guard lock(guard);
    auto found = reserved.find(address);
    auto inside = mapped.lower_bound(address);
    if (found == reserved.end() || found->second != size) return INVALID_VALUE;
    if (inside != mapped.end() && inside->first < address + size) return INVALID_VALUE;
    munmap(reinterpret_cast<void *>(address), size);
    reserved.erase(found);
    return SUCCESS;
}

int cuMemCreate(uint64_t *handle, size_t size, const Properties *p, uint64_t flags) {
    std::lock_guard lock(guard);
    if (!is_initialized) return NOT_INITIALIZED;
    if (!size || !is_whole(size) || !is_ours(p) || flags) return INVALID_VALUE;
    if (size > most_bytes - num_bytes) return OUT_OF_MEMORY;
    static uint64_t end = 0;
    uint64_t offset = end;
    for (auto [at, length] : holes)
        if (length == size) { offset = at; break; }
    if (offset == end) end += size;
    holes.erase(offset);
    if (ftruncate(file, end)) return OUT_OF_MEMORY;
    std::vector<char> ones(size, '\xff');
    if (pwrite(file, ones.data(), size, offset) != static_cast<ssize_t>(size)) return OUT_OF_MEMORY;
    num_bytes += size;
    chunks[*handle = next_handle++] = {size, offset, 0, false};
    return SUCCESS;
}

int cuMemRelease(uint64_t handle) {
    std::lock_guard lock(guard);
    auto found = chunks.find(handle);
    if (found == chunks.end() || found->second.is_released) return INVALID_VALUE;
    found->second.is_released = true;
    end_chunk(handle);
    return SUCCESS;
}

int cuMemMap(uint64_t address, size_t size, size_t offset, uint64_t handle, uint64_t flags) {
    std::lock_guard lock(guard);
    auto found = chunks.find(handle);
    if (found == chunks.end() || found->second.is_released || found->second.size != size) return INVALID_VALUE;
    if (offset || flags || !is_whole(address) || !is_reserved(address, size)) return INVALID_VALUE;
    auto next = mapped.lower_bound(address);
    if (next != mapped.end() && next->first < address + size) return INVALID_VALUE;
    if (next != mapped.begin() && (--next)->first + next->second.size > address) return INVALID_VALUE;
    void *place = reinterpret_cast<void *>(address);
    if (mmap(place, size, PROT_NONE, MAP_SHARED | MAP_FIXED, file, found->second.offset) == MAP_FAILED)
        return OUT_OF_MEMORY;
    found->second.num_mappings++;
    mapped[address] = {size, handle};
    return SUCCESS;
}

int cuMemUnmap(uint64_t address, size_t size) {
    std::lock_guard lock(guard);
    if (!is_mapped(address, size)) return INVALID_VALUE;
    int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    if (mmap(reinterpret_cast<void *>(address), size, PROT_NONE, kind, -1, 0) == MAP_FAILED) return OUT_OF_MEMORY;
    for (uint64_t at = address; at < address + size;) {
        Mapping mapping = mapped[at];
        mapped.erase(at);
        at += mapping.size;
        chunks[mapping.handle].num_mappings--;
        end_chunk(mapping.handle);
    }
    return SUCCESS;
}

int cuMemSetAccess(uint64_t address, size_t size, const Access *access, size_t count) {
    std::lock_guard lock(guard);
    if (count != 1 || access->location.type != 1 || access->location.id || access->flags != 3) return INVALID_VALUE;
    if (!is_mapped(address, size)) return INVALID_VALUE;
    return mprotect(reinterpret_cast<void *>(address), size, PROT_READ | PROT_WRITE) ? INVALID_VALUE : SUCCESS;
}

int cuGetErrorName(int error, const char **name) {
    switch (error) {
        case INVALID_VALUE: return *name = "CUDA_ERROR_INVALID_VALUE", SUCCESS;
        case OUT_OF_MEMORY: return *name = "CUDA_ERROR_OUT_OF_MEMORY", SUCCESS;
        case NOT_INITIALIZED: return *name = "CUDA_ERROR_NOT_INITIALIZED", SUCCESS;
        case INVALID_DEVICE: return *name = "CUDA_ERROR_INVALID_DEVICE", SUCCESS;
        default: return *name = nullptr, INVALID_VALUE;
    }
}

}  // extern "C"
