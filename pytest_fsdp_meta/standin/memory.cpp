// The devices of the stand-in: their memory, which is the host's, the current one of each thread, streams that do all
// work at once, and generators of random numbers.

#include "standin.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

namespace standin {
namespace {

using c10::Device;
using c10::DeviceIndex;

constexpr DeviceIndex kMostDevices = 64;
constexpr size_t kAlignment = 64;

DeviceIndex device_count = 1;
thread_local DeviceIndex current = 0;

DeviceIndex check_index(int index) {
  TORCH_CHECK(index >= 0 && index < device_count, "standin: invalid device ordinal ", index, ", there are ",
              static_cast<int>(device_count));
  return static_cast<DeviceIndex>(index);
}

DeviceIndex or_current(DeviceIndex index) { return index < 0 ? current : index; }

void* allocate_on_host(size_t bytes) {
  void* memory = nullptr;
  TORCH_CHECK_WITH(OutOfMemoryError, posix_memalign(&memory, kAlignment, std::max<size_t>(bytes, 1)) == 0,
                   "standin out of memory. Tried to allocate ", bytes, " bytes");
  return memory;
}

// Which addresses belong to which device, and how many bytes each device holds.
class Ledger {
 public:
  void add(const void* address, size_t bytes, DeviceIndex index) {
    std::lock_guard<std::mutex> lock(mutex_);
    blocks_[address] = {bytes, index};
    held_[index] += static_cast<int64_t>(bytes);
    peak_[index] = std::max(peak_[index], held_[index]);
  }
  void remove(const void* address, size_t bytes, DeviceIndex index) {
    std::lock_guard<std::mutex> lock(mutex_);
    blocks_.erase(address);
    held_[index] -= static_cast<int64_t>(bytes);
  }
  // Return the device whose block contains this address, or -1.
  DeviceIndex device_of(const void* address) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto block = blocks_.upper_bound(address);
    if (block == blocks_.begin()) return -1;
    --block;
    auto offset = static_cast<const char*>(address) - static_cast<const char*>(block->first);
    return static_cast<size_t>(offset) < block->second.bytes ? block->second.index : -1;
  }
  int64_t held(DeviceIndex index) {
    std::lock_guard<std::mutex> lock(mutex_);
    return held_[index];
  }
  int64_t peak(DeviceIndex index) {
    std::lock_guard<std::mutex> lock(mutex_);
    return peak_[index];
  }
  void reset_peak(DeviceIndex index) {
    std::lock_guard<std::mutex> lock(mutex_);
    peak_[index] = held_[index];
  }

 private:
  struct Block {
    size_t bytes;
    DeviceIndex index;
  };
  std::mutex mutex_;
  std::map<const void*, Block> blocks_;
  std::array<int64_t, kMostDevices> held_{};
  std::array<int64_t, kMostDevices> peak_{};
};

// Never destroyed: threads of autograd and gloo free tensors after main has returned.
Ledger& ledger() {
  static auto* it = new Ledger;
  return *it;
}
Ledger& pinned() {
  static auto* it = new Ledger;
  return *it;
}

struct Block {
  void* memory;
  size_t bytes;
  DeviceIndex index;
  std::optional<c10::Storage> adopted;
};

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  ledger().remove(block->memory, block->bytes, block->index);
  if (!block->adopted) std::free(block->memory);
  delete block;
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    Device device(kStandin, current);
    if (bytes == 0) return {nullptr, device};
    auto* block = new Block{allocate_on_host(bytes), bytes, current, std::nullopt};
    ledger().add(block->memory, bytes, current);
    return {block->memory, block, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
} allocator;

void free_pinned(void* context) {
  auto* block = static_cast<Block*>(context);
  pinned().remove(block->memory, block->bytes, 0);
  std::free(block->memory);
  delete block;
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* block = new Block{allocate_on_host(bytes), std::max<size_t>(bytes, 1), 0, std::nullopt};
    pinned().add(block->memory, block->bytes, 0);
    return {block->memory, block, &free_pinned, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
} pinned_allocator;

double milliseconds() {
  using namespace std::chrono;
  return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

// All work is done when a call returns, so streams need not wait, and an event is the time at which it was recorded.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kStandin; }
  Device exchangeDevice(Device device) const override {
    Device before(kStandin, current);
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return {kStandin, current}; }
  void setDevice(Device device) const override {
    if (device.index() < 0) return;
    check_index(device.index());
    current = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  c10::Stream getStream(Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, Device(kStandin, or_current(device.index())));
  }
  c10::Stream getDefaultStream(Device device) const override { return getStream(device); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return getStream(device); }
  c10::Stream getNewStream(Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return getStream(stream.device()); }
  void record(void** event, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new double(0);
    *static_cast<double*>(*event) = milliseconds();
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<double*>(event); }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    return *static_cast<double*>(second) - *static_cast<double*>(first);
  }
  DeviceIndex deviceCount() const noexcept override { return device_count; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Generator final : c10::GeneratorImpl {
  explicit Generator(DeviceIndex index, uint64_t seed = c10::default_rng_seed_val)
      : c10::GeneratorImpl(Device(kStandin, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), seed_(seed) {}

  static c10::DeviceType device_type() { return kStandin; }
  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == sizeof(uint64_t) * 2 && state.dtype() == caffe2::TypeMeta::Make<uint8_t>(),
                "standin: the state of a generator is 16 bytes, its seed and its offset, but got ", state.numel());
    uint64_t words[2];
    std::memcpy(words, state.data(), sizeof(words));
    seed_ = words[0];
    offset_ = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    // Not at::empty, which gives a tensor without memory under torch's FakeTensorMode.
    auto state = at::detail::empty_cpu({sizeof(uint64_t) * 2}, at::kByte, {}, {}, {}, {});
    uint64_t words[2] = {seed_, offset_};
    std::memcpy(state.data_ptr(), words, sizeof(words));
    return state.getIntrusivePtr();
  }
  at::Generator one_draw() {
    // splitmix64: neighbouring offsets and seeds give unrelated streams.
    uint64_t mixed = seed_ + 0x9e3779b97f4a7c15ULL * (offset_ + 1);
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9ULL;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebULL;
    offset_ += 4;  // CUDA's is a multiple of 4, which DTensor relies on
    return at::detail::createCPUGenerator(mixed ^ (mixed >> 31));
  }

 private:
  c10::GeneratorImpl* clone_impl() const override {
    auto* copy = new Generator(device().index(), seed_);
    copy->offset_ = offset_;
    return copy;
  }
  uint64_t seed_;
  uint64_t offset_ = 0;
};

const at::Generator& default_generator(DeviceIndex index) {
  static auto* generators = [] {
    auto* made = new std::vector<at::Generator>;
    for (DeviceIndex i = 0; i < kMostDevices; ++i) made->push_back(at::make_generator<Generator>(i));
    return made;
  }();
  return generators->at(check_index(or_current(index)));
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return device_count; }
  void setCurrentDevice(DeviceIndex index) const override { Guard().setDevice({kStandin, index}); }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    return Guard().exchangeDevice({kStandin, index}).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  bool isPinnedPtr(const void* address) const override { return pinned().device_of(address) >= 0; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  Device getDeviceFromPtr(void* address) const override {
    auto index = ledger().device_of(address);
    TORCH_CHECK(index >= 0, "standin: the address is of no device");
    return {kStandin, index};
  }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<Generator>(check_index(or_current(index)));
  }
  // FSDP frees and allocates the storages of gathered parameters with this.
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DeviceGuard guard(storage.device());
    auto memory = allocator.allocate(bytes);
    if (bytes > 0 && storage.nbytes() > 0) {
      std::memcpy(memory.mutable_get(), storage.data(), std::min(bytes, storage.nbytes()));
    }
    storage.set_data_ptr_noswap(std::move(memory));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

}  // namespace

DeviceIndex current_device() { return current; }

c10::Allocator* device_allocator() { return &allocator; }

c10::DataPtr adopt(const c10::Storage& made_on_host, Device device) {
  auto* memory = made_on_host.mutable_data();
  if (memory == nullptr) return {nullptr, device};
  auto* block = new Block{memory, made_on_host.nbytes(), device.index(), made_on_host};
  ledger().add(memory, block->bytes, device.index());
  return {memory, block, &free_block, device};
}

at::Generator generator_for_one_draw(const std::optional<at::Generator>& given, DeviceIndex index) {
  auto generator = given && given->defined() ? *given : default_generator(index);
  TORCH_CHECK(generator.device().type() == kStandin, "Expected a 'standin' device type for generator but found '",
              generator.device().type(), "'");
  std::lock_guard<std::mutex> lock(generator.mutex());
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->one_draw();
}

}  // namespace standin

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace standin;
  c10::SetAllocator(kStandin, &allocator);
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  m.def("set_device_count", [](int count) {
    TORCH_CHECK(count > 0 && count <= kMostDevices, "standin: between 1 and ", static_cast<int>(kMostDevices),
                " devices, not ", count);
    device_count = static_cast<DeviceIndex>(count);
  });
  m.def("device_count", [] { return static_cast<int>(device_count); });
  m.def("current_device", [] { return static_cast<int>(current); });
  // A negative index changes nothing, as in torch.cuda.
  m.def("set_device", [](int index) {
    if (index >= 0) Guard().setDevice({kStandin, check_index(index)});
  });
  m.def("memory_held", [](int index) { return ledger().held(check_index(index)); });
  m.def("memory_peak", [](int index) { return ledger().peak(check_index(index)); });
  m.def("reset_memory_peak", [](int index) { ledger().reset_peak(check_index(index)); });
  m.def("as_cpu", &on_host);
  m.def("default_generator", [](int index) { return default_generator(check_index(index)); });
}
