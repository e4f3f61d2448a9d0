// What memory.cpp (devices, memory, random numbers) offers to kernels.cpp (operators).
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>

#include <optional>

namespace standin {

constexpr auto kStandin = c10::DeviceType::PrivateUse1;

c10::DeviceIndex current_device();
c10::Allocator* device_allocator();

// Count memory that a CPU kernel has allocated as memory of this device, for as long as the result is referenced.
c10::DataPtr adopt(const c10::Storage& made_on_host, c10::Device device);

// A CPU generator for one draw. The state of a device's generator is its seed and how many draws it has made, as on
// CUDA, so that code which sets that offset, such as DTensor's, finds what it expects.
at::Generator generator_for_one_draw(const std::optional<at::Generator>& given, c10::DeviceIndex index);

// Return a CPU tensor with the same memory; a tensor that is on the CPU as it is.
at::Tensor on_host(const at::Tensor& tensor);

}  // namespace standin
