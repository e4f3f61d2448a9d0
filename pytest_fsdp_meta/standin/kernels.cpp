// The operators of the stand-in. Those that make, view and resize tensors are its own; every other one runs the CPU's
// kernel on tensors that share the memory, after a check that all tensors are on one device.

#include "standin.h"

#include <ATen/EmptyTensor.h>
#include <ATen/TensorOperators.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/histc.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <array>
#include <set>
#include <vector>

// Of ATen/autocast_mode.h, which includes every operator and would triple the time of the build.
namespace at::autocast {
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);
TORCH_API Tensor cached_cast(at::ScalarType to_type, const Tensor& arg, c10::DeviceType device_type);
}  // namespace at::autocast

namespace standin {
namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DispatchKey;
using c10::IntArrayRef;
using c10::Storage;

Tensor on_storage(const Tensor& like, Storage storage, DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  made._set_conj(like.is_conj());
  made._set_neg(like.is_neg());
  return made;
}

Storage host_view(const Storage& storage, bool resizable) {
  auto* kept = new Storage(storage);
  c10::DataPtr memory(storage.mutable_data(), kept, [](void* k) { delete static_cast<Storage*>(k); }, c10::kCPU);
  return Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), storage.nbytes(), std::move(memory), c10::GetAllocator(c10::kCPU), resizable));
}

// Return a CPU tensor with the same memory.
Tensor as_cpu(const Tensor& tensor, bool resizable = false) {
  if (tensor.device().type() != kStandin) return tensor;
  TORCH_CHECK(resizable || tensor.numel() == 0 || tensor.storage().data() != nullptr,
              "standin: the storage of this tensor has no memory: it was freed, as FSDP frees gathered parameters");
  return on_storage(tensor, host_view(tensor.storage(), resizable), DispatchKey::CPU);
}

Storage device_storage(const Storage& made_on_host, DeviceIndex index) {
  return Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), made_on_host.nbytes(),
                                                       adopt(made_on_host, Device(kStandin, index)),
                                                       device_allocator(), true));
}

// Return a tensor of the device that takes the memory of a CPU tensor over.
Tensor as_standin(const Tensor& made_on_host, DeviceIndex index) {
  if (made_on_host.is_conj() || made_on_host.is_neg()) {
    return as_standin(made_on_host.resolve_conj().resolve_neg(), index);
  }
  return on_storage(made_on_host, device_storage(made_on_host.storage(), index), DispatchKey::PrivateUse1);
}

// As on CUDA, indices may be on the CPU.
bool takes_indices_from_cpu(const std::string& name) {
  static const std::set<std::string> names{"aten::index",      "aten::_unsafe_index",     "aten::index_put",
                                           "aten::index_put_", "aten::_index_put_impl_"};
  return names.count(name) > 0;
}

[[noreturn]] void on_two_devices(const std::string& name, const std::string& first, const std::string& second) {
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", first, " and ",
              second, "! (when checking argument in method wrapper_standin_", name, ")");
}

// One call of an operator: its arguments are replaced by CPU tensors, and what it wrote and returns by the device's.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack) : op_(op), schema_(op.schema()), stack_(stack) {}

  void run() {
    size_t count = schema_.arguments().size();
    size_t first = stack_->size() - count;
    for (size_t i = 0; i < count; ++i) lower((*stack_)[first + i], is_written(schema_.arguments()[i]));
    if (device_ && has_cpu_tensor_) {
      on_two_devices(schema_.name(), device_->str(), "cpu");
    }
    index_ = device_ && device_->index() >= 0 ? device_->index() : current_device();
    for (size_t i = 0; i < count; ++i) {
      // CPU kernels check that a generator is the CPU's, so each draw gets one of its own.
      if (is_generator(schema_.arguments()[i])) {
        auto& value = (*stack_)[first + i];
        auto given = value.isGenerator() ? std::optional<at::Generator>(value.toGenerator()) : std::nullopt;
        value = generator_for_one_draw(given, index_);
      }
    }
    c10::DeviceGuard guard(Device(kStandin, index_));
    op_.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), stack_);
    for (auto& pair : pairs_) {
      if (pair.written) take_over(pair);
    }
    size_t returned = schema_.returns().size();
    for (size_t i = stack_->size() - returned; i < stack_->size(); ++i) raise((*stack_)[i]);
  }

 private:
  struct Pair {
    Tensor device;
    Tensor host;
    const void* memory;
    bool written;
  };

  static bool is_written(const c10::Argument& argument) {
    return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
  }

  static bool is_generator(const c10::Argument& argument) {
    auto type = argument.type();
    if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
    return type->kind() == c10::TypeKind::GeneratorType;
  }

  Tensor lower(const Tensor& tensor, bool written) {
    if (!tensor.defined()) return tensor;
    if (tensor.device().type() != kStandin) {
      // As on CUDA, a number may be on the CPU.
      has_cpu_tensor_ |= tensor.is_cpu() && tensor.dim() > 0;
      return tensor;
    }
    if (!device_) device_ = tensor.device();
    if (*device_ != tensor.device()) on_two_devices(schema_.name(), device_->str(), tensor.device().str());
    for (const auto& pair : pairs_) {
      if (pair.device.is_same(tensor)) return pair.host;
    }
    auto host = as_cpu(tensor, written);
    pairs_.push_back({tensor, host, host.storage().data(), written});
    return host;
  }

  void lower(c10::IValue& value, bool written) {
    if (value.isTensor()) {
      value = lower(value.toTensor(), written);
    } else if (value.isTensorList()) {
      auto tensors = value.toTensorVector();
      for (auto& tensor : tensors) tensor = lower(tensor, written);
      value = tensors;
    } else if (value.isOptionalTensorList()) {
      bool had_cpu_tensor = has_cpu_tensor_;
      c10::List<std::optional<Tensor>> lowered;
      for (std::optional<Tensor> tensor : value.toOptionalTensorVector()) {
        lowered.push_back(tensor ? std::optional<Tensor>(lower(*tensor, written)) : tensor);
      }
      value = lowered;
      if (takes_indices_from_cpu(schema_.name())) has_cpu_tensor_ = had_cpu_tensor;
    } else if (value.isDevice() && value.toDevice().type() == kStandin) {
      if (!device_) device_ = value.toDevice();
      value = Device(c10::kCPU);
    }
  }

  // A CPU kernel may have given an output other memory or another shape.
  void take_over(const Pair& pair) {
    auto host = pair.host.storage();
    if (host.data() != pair.memory || host.nbytes() > pair.device.storage().nbytes()) {
      auto storage = pair.device.storage();
      storage.set_data_ptr_noswap(adopt(host, Device(kStandin, index_)));
      storage.unsafeGetStorageImpl()->set_nbytes(host.nbytes());
    }
    if (pair.device.sizes() != pair.host.sizes() || pair.device.strides() != pair.host.strides()) {
      pair.device.unsafeGetTensorImpl()->set_sizes_and_strides(pair.host.sizes(), pair.host.strides(),
                                                               pair.host.storage_offset());
    }
  }

  Tensor raise(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.device().is_cpu()) return tensor;
    TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == c10::kStrided && !tensor.is_quantized(),
                                "standin: sparse and quantized tensors are not implemented; test them on the CPU");
    for (const auto& pair : pairs_) {
      if (pair.host.is_same(tensor)) return pair.device;
      if (pair.host.storage().unsafeGetStorageImpl() == tensor.storage().unsafeGetStorageImpl()) {
        return on_storage(tensor, pair.device.storage(), DispatchKey::PrivateUse1);
      }
    }
    return as_standin(tensor, index_);
  }

  void raise(c10::IValue& value) {
    if (value.isTensor()) {
      value = raise(value.toTensor());
    } else if (value.isTensorList()) {
      auto tensors = value.toTensorVector();
      for (auto& tensor : tensors) tensor = raise(tensor);
      value = tensors;
    }
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack* stack_;
  std::vector<Pair> pairs_;
  std::optional<Device> device_;
  bool has_cpu_tensor_ = false;
  DeviceIndex index_ = 0;
};

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, stack).run(); }

DeviceIndex index_of(std::optional<Device> device) {
  return device && device->index() >= 0 ? device->index() : current_device();
}

// Deterministic mode fills memory that nothing has written yet, as the CPU's and CUDA's kernels do.
Tensor filled(Tensor tensor) {
  if (at::globalContext().deterministicAlgorithms() && at::globalContext().deterministicFillUninitializedMemory() &&
      tensor.numel() > 0) {
    at::native::fill_empty_deterministic_(tensor);
  }
  return tensor;
}

Tensor empty(IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
             std::optional<Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(Device(kStandin, index_of(device)));
  return filled(at::detail::empty_generic(size, device_allocator(), c10::DispatchKeySet(DispatchKey::PrivateUse1),
                                          c10::dtype_or_default(dtype), format));
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(Device(kStandin, index_of(device)));
  return filled(at::detail::empty_strided_generic(size, stride, device_allocator(),
                                                  c10::DispatchKeySet(DispatchKey::PrivateUse1),
                                                  c10::dtype_or_default(dtype)));
}

// The gradient of what does not depend on its input: elsewhere a tensor without memory.
Tensor efficient_zeros(IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                       std::optional<Device> device, std::optional<bool>) {
  return empty(size, dtype, {}, device, {}, {}).zero_();
}

Tensor as_strided(const Tensor& self, IntArrayRef size, IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
Tensor view(const Tensor& self, IntArrayRef size) { return at::native::view(self, size); }
Tensor reshape_alias(const Tensor& self, IntArrayRef size, IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}
Tensor unfold(const Tensor& self, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(self, dim, size, step);
}
const Tensor& resize_(const Tensor& self, IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(self.device());
  return at::native::resize_(self, size, format);
}
Tensor& set_storage(Tensor& self, Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(storage), offset, size, stride);
}
Tensor& set_whole_storage(Tensor& self, Storage storage) { return at::native::set_(self, std::move(storage)); }
Tensor& set_tensor(Tensor& self, const Tensor& source) { return at::native::set_tensor_(self, source); }
Tensor& set_empty(Tensor& self) { return at::native::set_cpu_(self); }

Tensor copy_from(const Tensor& source, const Tensor& target, bool) {
  TORCH_CHECK_NOT_IMPLEMENTED(!source.is_meta(), "Cannot copy out of meta tensor; no data!");
  if (!target.is_meta()) as_cpu(target).copy_(as_cpu(source));
  return target;
}
Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}
at::Scalar local_scalar_dense(const Tensor& self) { return at::_local_scalar_dense(as_cpu(self)); }
void record_stream(Tensor&, c10::Stream) {}

// Module.to keeps parameters, and so ties, as between the CPU and CUDA.
bool has_compatible_shallow_copy_type(const Tensor& self, const Tensor& from) {
  auto plain = [](const Tensor& tensor) {
    return (tensor.is_cpu() || tensor.device().type() == kStandin) && tensor.layout() == c10::kStrided;
  };
  return plain(self) && plain(from);
}

void check_one_device(const std::string& name, const std::vector<Tensor>& tensors) {
  for (const auto& tensor : tensors) {
    if (tensor.defined() && tensor.device() != tensors[0].device()) {
      on_two_devices(name, tensors[0].device().str(), tensor.device().str());
    }
  }
}

Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, IntArrayRef stride,
                   IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output_padding,
                   int64_t groups) {
  check_one_device("aten::convolution", {input, weight, bias.value_or(Tensor())});
  auto host_bias = bias && bias->defined() ? std::optional<Tensor>(as_cpu(*bias)) : std::nullopt;
  return as_standin(at::convolution(as_cpu(input), as_cpu(weight), host_bias, stride, padding, dilation, transposed,
                                    output_padding, groups),
                    input.device().index());
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& gradient, const Tensor& input,
                                                        const Tensor& weight, IntArrayRef stride, IntArrayRef padding,
                                                        IntArrayRef dilation, bool transposed,
                                                        IntArrayRef output_padding, int64_t groups,
                                                        std::array<bool, 3> mask) {
  int64_t biases = transposed ? weight.size(1) * groups : weight.size(0);
  auto [of_input, of_weight, of_bias] = at::convolution_backward(
      as_cpu(gradient), as_cpu(input), as_cpu(weight), mask[2] ? at::OptionalIntArrayRef(biases) : std::nullopt, stride,
      padding, dilation, transposed, output_padding, groups, mask);
  auto raised = [&](const Tensor& made) {
    return made.defined() ? as_standin(made, gradient.device().index()) : made;
  };
  return {raised(of_input), raised(of_weight), raised(of_bias)};
}

// CUDA counts integers, for example tokens per expert; the CPU's kernel does not.
Tensor histc(const Tensor& self, int64_t bins, const at::Scalar& low, const at::Scalar& high) {
  auto host = as_cpu(self);
  auto counted = at::isIntegralType(host.scalar_type(), false) ? host.to(at::kDouble) : host;
  return as_standin(at::histc(counted, bins, low, high).to(host.scalar_type()), self.device().index());
}

// The CPU's kernel takes no generator: it would draw from the CPU's.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& self, double p, std::optional<bool> train) {
  if (self.numel() == 0 || !train.value_or(true) || p == 0) {
    return {self.clone(), at::ones_like(self, self.options().dtype(at::kBool))};
  }
  auto kept = at::empty_like(self, self.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {self.mul(kept).mul(p == 1 ? 0.0 : 1 / (1 - p)), kept};
}

// torch has the cells of recurrent layers for GPUs as one kernel, which the CPU lacks. The third result of an LSTM's and
// the second of a GRU's are for the kernel's own backward.
Tensor with_bias(const Tensor& gates, const std::optional<Tensor>& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cell,
                                             const std::optional<Tensor>& input_bias,
                                             const std::optional<Tensor>& hidden_bias) {
  auto gates = with_bias(input_gates, input_bias) + with_bias(hidden_gates, hidden_bias);
  auto parts = gates.chunk(4, 1);
  auto new_cell = parts[1].sigmoid() * cell + parts[0].sigmoid() * parts[2].tanh();
  return {parts[3].sigmoid() * new_cell.tanh(), new_cell, gates.detach()};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hidden,
                                    const std::optional<Tensor>& input_bias, const std::optional<Tensor>& hidden_bias) {
  auto of_input = with_bias(input_gates, input_bias).chunk(3, 1);
  auto of_hidden = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
  auto reset = (of_hidden[0] + of_input[0]).sigmoid();
  auto update = (of_hidden[1] + of_input[1]).sigmoid();
  auto proposed = (of_input[2] + of_hidden[2] * reset).tanh();
  return {(hidden - proposed) * update + proposed, proposed.detach()};
}

// For both keys: without autograd in inference mode only, else it follows the operators inside.
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_gru_cell", gru_cell);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_efficientzerotensor", efficient_zeros);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", unfold);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_empty);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("record_stream", record_stream);
  m.impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("histc", histc);
  m.impl("native_dropout", native_dropout);
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  // torch decomposes these for other devices than the CPU and CUDA, with other rounding.
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

// Copies of conjugated and negated views reach _copy_from, instead of being resolved by a copy again and again.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

// torch.autocast: each operator in the precision that it has on CUDA.
bool is_cast(const Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kStandin && tensor.is_floating_point() &&
         tensor.scalar_type() != at::kDouble;
}

c10::ScalarType lower_precision(const std::vector<Tensor>&) { return at::autocast::get_autocast_dtype(kStandin); }
c10::ScalarType float32(const std::vector<Tensor>&) { return at::kFloat; }
c10::ScalarType widest(const std::vector<Tensor>& tensors) {
  for (const auto& tensor : tensors) {
    if (is_cast(tensor) && tensor.scalar_type() == at::kFloat) return at::kFloat;
  }
  return at::autocast::get_autocast_dtype(kStandin);
}

template <c10::ScalarType (*dtype_of)(const std::vector<Tensor>&)>
void autocast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard without_autocast(DispatchKey::AutocastPrivateUse1);
  size_t first = stack->size() - op.schema().arguments().size();
  std::vector<Tensor> tensors;
  for (size_t i = first; i < stack->size(); ++i) {
    const auto& value = (*stack)[i];
    if (value.isTensor()) tensors.push_back(value.toTensor());
    if (value.isTensorList()) {
      for (const Tensor& tensor : value.toTensorVector()) tensors.push_back(tensor);
    }
  }
  auto dtype = dtype_of(tensors);
  auto cast = [&](const Tensor& tensor) {
    return is_cast(tensor) ? at::autocast::cached_cast(dtype, tensor, kStandin) : tensor;
  };
  for (size_t i = first; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = cast(value.toTensor());
    } else if (value.isTensorList()) {
      auto cast_tensors = value.toTensorVector();
      for (auto& tensor : cast_tensors) tensor = cast(tensor);
      value = cast_tensors;
    }
  }
  op.callBoxed(stack);
}

// torch's lists for CUDA (ATen/autocast_mode.h), without what needs cuDNN.
constexpr std::array kLowerPrecision{
    "conv1d",      "conv2d",      "conv3d", "conv_tbc",         "conv_transpose1d", "conv_transpose2d.input",
    "conv_transpose3d.input", "convolution", "prelu",  "addmm",            "addmv",            "addr",
    "matmul",      "einsum",      "mm",     "mv",               "linalg_vecdot",    "linear",
    "addbmm",      "baddbmm",     "bmm",    "chain_matmul",     "linalg_multi_dot", "_thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell",       "lstm_cell", "gru_cell",      "rnn_tanh_cell",    "rnn_relu_cell",
    "scaled_dot_product_attention"};
constexpr std::array kFloat32{"acos",
                              "asin",
                              "cosh",
                              "erfinv",
                              "exp",
                              "expm1",
                              "log",
                              "log10",
                              "log2",
                              "log1p",
                              "reciprocal",
                              "rsqrt",
                              "sinh",
                              "tan",
                              "pow.Tensor_Scalar",
                              "pow.Tensor_Tensor",
                              "pow.Scalar",
                              "softplus",
                              "layer_norm",
                              "native_layer_norm",
                              "group_norm",
                              "cosine_similarity",
                              "poisson_nll_loss",
                              "cosine_embedding_loss",
                              "nll_loss",
                              "nll_loss2d",
                              "hinge_embedding_loss",
                              "kl_div",
                              "l1_loss",
                              "smooth_l1_loss",
                              "huber_loss",
                              "mse_loss",
                              "margin_ranking_loss",
                              "multilabel_margin_loss",
                              "soft_margin_loss",
                              "triplet_margin_loss",
                              "multi_margin_loss",
                              "binary_cross_entropy_with_logits",
                              "dist",
                              "renorm",
                              "logsumexp",
                              "prod",
                              "prod.dim_int",
                              "softmax.int",
                              "log_softmax.int",
                              "cumprod",
                              "cumsum",
                              "linalg_vector_norm",
                              "sum",
                              "sum.dim_IntList"};
constexpr std::array kWidest{"addcdiv", "addcmul",   "atan2",     "bilinear",    "cross",
                             "dot",     "vdot",      "index_put", "tensordot",   "scatter_add"};

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  for (const auto* name : kLowerPrecision) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&autocast<&lower_precision>>());
  }
  for (const auto* name : kFloat32) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&autocast<&float32>>());
  for (const auto* name : kWidest) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&autocast<&widest>>());
}

}  // namespace

Tensor on_host(const Tensor& tensor) { return as_cpu(tensor); }

}  // namespace standin
