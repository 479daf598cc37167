// A layer's products as operators of the library (see csrc/bindings.cpp): checks, allocation, current stream.

#include "operators.h"

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <optional>
#include <tuple>

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
namespace layer = kimi_fx::layer;

layer::Chip chip_of(const Tensor& x) {
    int index = x.get_device_index();
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index, &stream));
    auto attribute = [&](cudaDeviceAttr which) {
        int value = 0;
        STD_CUDA_CHECK(cudaDeviceGetAttribute(&value, which, index));
        return value;
    };
    return {10 * attribute(cudaDevAttrComputeCapabilityMajor) + attribute(cudaDevAttrComputeCapabilityMinor),
            attribute(cudaDevAttrMultiProcessorCount), attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin),
            static_cast<cudaStream_t>(stream)};
}

void check(const Tensor& x, const char* name, std::initializer_list<int64_t> sizes,
           ScalarType type = ScalarType::BFloat16) {
    bool fits = x.is_cuda() && x.is_contiguous() && x.scalar_type() == type && x.dim() == int64_t(sizes.size());
    int64_t dim = 0;
    for (int64_t size : sizes) fits = fits && x.size(dim++) == size;
    STD_TORCH_CHECK(fits, name, ": wanted a contiguous CUDA tensor of the documented dtype and of sizes that agree.");
}

void check_few(int64_t T, std::initializer_list<int64_t> widths) {
    STD_TORCH_CHECK(T >= 1 && T <= layer::kMostTokens, "1 to ", layer::kMostTokens, " rows are built, found ", T, ".");
    for (int64_t width : widths) STD_TORCH_CHECK(width % 8 == 0, "widths are multiples of 8, found ", width, ".");
}

const __nv_bfloat16* values(const Tensor& x) { return static_cast<const __nv_bfloat16*>(x.const_data_ptr()); }
const float* floats(const Tensor& x) { return static_cast<const float*>(x.const_data_ptr()); }

template <typename T = __nv_bfloat16>
T* out(Tensor& x) {
    return static_cast<T*>(x.mutable_data_ptr());
}

// Zeros in which the blocks of a launch tell each other something and that they leave as they were: two counts, and
// from the fifth on as many `values`.
int32_t* counts(const Tensor& counters, int64_t values = 0) {
    check(counters, "counters", {counters.size(0)}, ScalarType::Int);
    STD_TORCH_CHECK(counters.size(0) >= 4 + values, "counters: wanted ", 4 + values, " zeros, found ", counters.size(0), ".");
    return static_cast<int32_t*>(const_cast<void*>(counters.const_data_ptr()));
}

// Room for what is normed ahead of its product, where tokens are many.
Tensor normed_ahead(const Tensor& x) {
    return torch::stable::new_empty(x, {x.size(0) > layer::kFew ? x.size(0) : 0, x.size(1)});
}

Tensor norm_linear(const Tensor& x, const Tensor& norm, const Tensor& weight, double eps, bool wide) {
    int64_t T = x.size(0), inputs = x.size(1), rows = weight.size(0);
    check_few(T, {inputs, rows});
    check(x, "x", {T, inputs});
    check(norm, "norm", {inputs});
    check(weight, "weight", {rows, inputs});
    torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
    Tensor h = normed_ahead(x);
    Tensor result = torch::stable::new_empty(x, {T, rows}, wide ? ScalarType::Float : ScalarType::BFloat16);
    layer::LinearParams params{.x = values(x),
                               .norm = values(norm),
                               .w = values(weight),
                               .h = out(h),
                               .out = out<void>(result),
                               .T = static_cast<int>(T),
                               .inputs = static_cast<int>(inputs),
                               .rows = static_cast<int>(rows),
                               .eps = static_cast<float>(eps),
                               .wide = wide};
    STD_CUDA_CHECK(layer::launch_norm_linear(params, chip_of(x)));
    return result;
}

layer::AddParams add_params(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& residual,
                            const std::optional<Tensor>& other, Tensor& result) {
    int64_t T = x.size(0), inputs = x.size(1), rows = weight.size(0);
    check_few(T, {inputs, rows});
    check(x, "x", {T, inputs});
    check(weight, "weight", {rows, inputs});
    if (residual) check(*residual, "residual", {T, rows});
    if (other) check(*other, "other", {T, rows});
    return {.x = values(x),
            .w = values(weight),
            .residual = residual ? values(*residual) : nullptr,
            .other = other ? values(*other) : nullptr,
            .out = out(result),
            .squares = nullptr,
            .T = static_cast<int>(T),
            .inputs = static_cast<int>(inputs),
            .rows = static_cast<int>(rows)};
}

Tensor linear_add(const Tensor& x, const Tensor& weight, std::optional<Tensor> residual, std::optional<Tensor> other) {
    torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
    Tensor result = torch::stable::new_empty(x, {x.size(0), weight.size(0)});
    STD_CUDA_CHECK(layer::launch_linear_add(add_params(x, weight, residual, other, result), chip_of(x)));
    return result;
}

Tensor norm_gate_up(const Tensor& x, const Tensor& norm, const Tensor& weight, double eps) {
    int64_t T = x.size(0), D = x.size(1), I = weight.size(1);
    check_few(T, {D, I});
    check(x, "x", {T, D});
    check(norm, "norm", {D});
    check(weight, "gate_up", {2, I, D});
    torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
    Tensor h = normed_ahead(x), result = torch::stable::new_empty(x, {T, I});
    layer::GateUpParams params{.x = values(x),
                               .norm = values(norm),
                               .w = values(weight),
                               .h = out(h),
                               .out = out(result),
                               .T = static_cast<int>(T),
                               .D = static_cast<int>(D),
                               .I = static_cast<int>(I),
                               .eps = static_cast<float>(eps)};
    STD_CUDA_CHECK(layer::launch_gate_up(params, chip_of(x)));
    return result;
}

std::tuple<Tensor, Tensor> q_up_absorb(const Tensor& x, const Tensor& q_norm, const Tensor& norm, const Tensor& q_b,
                                       const Tensor& w_uk, const Tensor& cos, const Tensor& sin, const Tensor& counters, double eps) {
    int64_t T = x.size(0), H = q_b.size(0), q_lora = q_b.size(2), nope = w_uk.size(1), L = w_uk.size(2);
    int64_t R = q_b.size(1) - nope;
    check_few(T, {q_lora, nope, L, R});
    check(x, "qkv", {T, q_lora + L + R});
    check(q_norm, "q_norm", {q_lora});
    check(norm, "kv_norm", {L});
    check(q_b, "q_b", {H, nope + R, q_lora});
    check(w_uk, "w_uk", {H, nope, L});
    check(cos, "cos", {T, R}, ScalarType::Float);
    check(sin, "sin", {T, R}, ScalarType::Float);
    torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
    layer::Chip chip = chip_of(x);
    Tensor unabsorbed = torch::stable::new_empty(x, {T, H, nope});
    Tensor q = torch::stable::new_empty(x, {T, H, L + R}), rows = torch::stable::new_empty(x, {T, L + R});
    layer::QUpParams up{.x = values(x),
                        .q_norm = values(q_norm),
                        .norm = values(norm),
                        .w = values(q_b),
                        .cos = floats(cos),
                        .sin = floats(sin),
                        .nope = out(unabsorbed),
                        .q = out(q),
                        .rows = out(rows),
                        .T = static_cast<int>(T),
                        .H = static_cast<int>(H),
                        .q_lora = static_cast<int>(q_lora),
                        .L = static_cast<int>(L),
                        .R = static_cast<int>(R),
                        .nope_width = static_cast<int>(nope),
                        .eps = static_cast<float>(eps)};
    layer::HeadParams absorb{.x = values(unabsorbed),
                             .w = values(w_uk),
                             .out = out(q),
                             .T = static_cast<int>(T),
                             .H = static_cast<int>(H),
                             .inputs = static_cast<int>(nope),
                             .rows = static_cast<int>(L),
                             .pitch = static_cast<int>(L + R)};
    STD_CUDA_CHECK(layer::launch_q_up_absorb(up, absorb, counts(counters), chip));
    return {q, rows};
}

std::tuple<Tensor, Tensor> v_up_o(const Tensor& x, const Tensor& w_uv, const Tensor& weight,
                                  const std::optional<Tensor>& residual, const Tensor& counters) {
    int64_t T = x.size(0), H = x.size(1), L = x.size(2), value = w_uv.size(1), D = weight.size(0);
    check_few(T, {L, value});
    check(x, "o", {T, H, L});
    check(w_uv, "w_uv", {H, value, L});
    torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
    layer::Chip chip = chip_of(x);
    Tensor v = torch::stable::new_empty(x, {T, H * value}), result = torch::stable::new_empty(x, {T, D});
    Tensor squares = torch::stable::new_empty(x, {T, (D + 31) / 32}, ScalarType::Float);
    layer::HeadParams up{.x = values(x),
                         .w = values(w_uv),
                         .out = out(v),
                         .T = static_cast<int>(T),
                         .H = static_cast<int>(H),
                         .inputs = static_cast<int>(L),
                         .rows = static_cast<int>(value),
                         .pitch = static_cast<int>(value)};
    layer::AddParams add = add_params(v, weight, residual, std::nullopt, result);
    add.squares = out<float>(squares);
    STD_CUDA_CHECK(layer::launch_v_up_o(up, add, counts(counters), chip));
    return {result, squares};
}

using Routed = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Routed norm_route(const Tensor& x, const Tensor& squares, const Tensor& counters, const Tensor& norm,
                  const Tensor& router, const Tensor& bias, const Tensor& gate_up, const Tensor& valid, int64_t k,
                  double scale, double eps) {
    int64_t T = x.size(0), D = x.size(1), E = router.size(0), I = gate_up.size(1), pieces = squares.size(1);
    check_few(T, {D, E, I});
    check(x, "x", {T, D});
    check(squares, "squares", {T, pieces}, ScalarType::Float);
    check(norm, "norm", {D});
    check(router, "router", {E, D});
    check(bias, "bias", {E}, ScalarType::Float);
    check(gate_up, "gate_up", {2, I, D});
    check(valid, "valid", {T}, ScalarType::Bool);
    STD_TORCH_CHECK(E <= layer::kMostRouted && k >= 1 && k <= std::min<int64_t>(E, layer::kMostChosen), "top ", k, " of ", E,
                    " experts was asked for: at most ", layer::kMostChosen, " of ", layer::kMostRouted, " are built.");
    torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
    layer::Chip chip = chip_of(x);
    Tensor h = torch::stable::new_empty(x, {T, D}), shared = torch::stable::new_empty(x, {T, I});
    Tensor weights = torch::stable::new_empty(squares, {T, k});
    int32_t* zeros = counts(counters, T * (E + k));
    Tensor ids = torch::stable::new_empty(x, {T, k}, ScalarType::Int);
    Tensor order = torch::stable::new_empty(ids, {T * k}), offsets = torch::stable::new_empty(ids, {E + 1});
    layer::RouteParams params{.x = values(x),
                              .squares = floats(squares),
                              .norm = values(norm),
                              .router = values(router),
                              .bias = floats(bias),
                              .gate_up = values(gate_up),
                              .valid = static_cast<const bool*>(valid.const_data_ptr()),
                              .h = out(h),
                              .logits = reinterpret_cast<float*>(zeros + 4),
                              .shared = out(shared),
                              .ids = out<int32_t>(ids),
                              .weights = out<float>(weights),
                              .order = out<int32_t>(order),
                              .offsets = out<int32_t>(offsets),
                              .shown = zeros + 4 + T * E,
                              .T = static_cast<int>(T),
                              .D = static_cast<int>(D),
                              .E = static_cast<int>(E),
                              .I = static_cast<int>(I),
                              .K = static_cast<int>(k),
                              .pieces = static_cast<int>(pieces),
                              .scale = static_cast<float>(scale),
                              .eps = static_cast<float>(eps)};
    STD_CUDA_CHECK(layer::launch_norm_route(params, chip));
    return {h, shared, ids, weights, order, offsets};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(kimi_fx_cuda, m) {
    m.def("norm_linear(Tensor x, Tensor norm, Tensor weight, float eps, bool wide) -> Tensor");
    m.def("linear_add(Tensor x, Tensor weight, Tensor? residual, Tensor? other) -> Tensor");
    m.def("norm_gate_up(Tensor x, Tensor norm, Tensor gate_up, float eps) -> Tensor");
    m.def(
        "q_up_absorb(Tensor qkv, Tensor q_norm, Tensor kv_norm, Tensor q_b, Tensor w_uk, Tensor cos, Tensor sin, "
        "Tensor counters, float eps) -> (Tensor, Tensor)");
    m.def("v_up_o(Tensor o, Tensor w_uv, Tensor weight, Tensor? residual, Tensor counters) -> (Tensor, Tensor)");
    m.def(
        "norm_route(Tensor x, Tensor squares, Tensor counters, Tensor norm, Tensor router, Tensor bias, Tensor gate_up, "
        "Tensor valid, int k, float scale, float eps) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(kimi_fx_cuda, CUDA, m) {
    m.impl("norm_linear", TORCH_BOX(&norm_linear));
    m.impl("linear_add", TORCH_BOX(&linear_add));
    m.impl("norm_gate_up", TORCH_BOX(&norm_gate_up));
    m.impl("q_up_absorb", TORCH_BOX(&q_up_absorb));
    m.impl("v_up_o", TORCH_BOX(&v_up_o));
    m.impl("norm_route", TORCH_BOX(&norm_route));
}
