// The library's operators on the LibTorch stable ABI, target 2.11: checks, allocation, current stream.
//
// They are `kimi_fx_cuda::…`; the operators the graphs call are `kimi_fx::…` of kimi_fx/ops, whose CUDA kernels call
// these where dtype and widths fit. Schemas take no out arguments: nothing is mutated, nothing aliases.

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "mla/launch.h"
#include "mla/schedule.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
namespace mla = kimi_fx::mla;

struct Device {
    int arch;    // 90: compute capability 9.0
    int blocks;  // one a multiprocessor
    int shared;  // bytes a block may opt into
    cudaStream_t stream;
};

int attribute(cudaDeviceAttr which, int device) {
    int value = 0;
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&value, which, device));
    return value;
}

Device device_of(const Tensor& x) {
    int index = x.get_device_index();
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index, &stream));
    int arch = 10 * attribute(cudaDevAttrComputeCapabilityMajor, index) +
               attribute(cudaDevAttrComputeCapabilityMinor, index);
    return {arch, std::min(attribute(cudaDevAttrMultiProcessorCount, index), mla::kMaxBlocks),
            attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, index), static_cast<cudaStream_t>(stream)};
}

void check(const Tensor& x, const char* name, ScalarType type, int64_t dim) {
    STD_TORCH_CHECK(x.is_cuda() && x.is_contiguous() && x.dim() == dim && x.scalar_type() == type, name,
                    ": wanted a contiguous CUDA tensor of ", dim, " dimensions and the documented dtype.");
}

Tensor mla_schedule(const Tensor& length, int64_t nodes, int64_t heads) {
    check(length, "length", ScalarType::Int, 1);
    torch::stable::accelerator::DeviceGuard guard(length.get_device_index());
    Device device = device_of(length);
    int N = nodes, H = heads, B = length.size(0);
    Tensor schedule = torch::stable::new_empty(length, {mla::schedule_size(B, N, H)});
    STD_CUDA_CHECK(mla::launch_schedule(length.const_data_ptr<int32_t>(), schedule.mutable_data_ptr<int32_t>(), B, N, H,
                                        mla::row_tile(N, H), device.blocks, device.stream));
    return schedule;
}

template <typename T>
const T* data(const Tensor& x) {
    return static_cast<const T*>(x.const_data_ptr());
}

Tensor mla_tree_verify(const Tensor& q, const Tensor& pool, const Tensor& page_table, const Tensor& length,
                       const Tensor& rows, std::optional<Tensor> ancestors, const Tensor& schedule, double scale) {
    check(q, "q", ScalarType::BFloat16, 4);
    check(pool, "pool", ScalarType::BFloat16, 3);
    check(page_table, "page_table", ScalarType::Int, 2);
    check(length, "length", ScalarType::Int, 1);
    check(rows, "rows", ScalarType::BFloat16, 3);
    check(schedule, "schedule", ScalarType::Int, 1);
    if (ancestors) check(*ancestors, "ancestors", ScalarType::Long, 3);
    int B = q.size(0), N = q.size(1), H = q.size(2);
    STD_TORCH_CHECK(q.size(3) == mla::kRow && pool.size(1) == mla::kPage && pool.size(2) == mla::kRow,
                    "rows of 512 + 64 columns and pages of 64 tokens are built, found ", q.size(3), " columns.");
    STD_TORCH_CHECK(!ancestors || N <= mla::kMaxTree, "a tree has at most 128 nodes, found ", N, ".");
    STD_TORCH_CHECK(schedule.size(0) == mla::schedule_size(B, N, H), "the schedule is of another shape.");

    torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
    Device device = device_of(q);
    int M = mla::row_tile(N, H);
    Tensor out = torch::stable::new_empty(q, {B, N, H, mla::kLatent});
    Tensor partial_o = torch::stable::new_empty(q, {2 * device.blocks, M, mla::kLatent}, ScalarType::Half);
    Tensor partial_lse = torch::stable::new_empty(q, {2 * device.blocks, M}, ScalarType::Float);
    mla::Params params{
        .q = data<__nv_bfloat16>(q),
        .pool = data<__nv_bfloat16>(pool),
        .page_table = data<int32_t>(page_table),
        .length = data<int32_t>(length),
        .rows = data<__nv_bfloat16>(rows),
        .ancestors = ancestors ? data<uint64_t>(*ancestors) : nullptr,
        .schedule = data<int32_t>(schedule),
        .partial_o = static_cast<__half*>(partial_o.mutable_data_ptr()),
        .partial_lse = static_cast<float*>(partial_lse.mutable_data_ptr()),
        .out = static_cast<__nv_bfloat16*>(out.mutable_data_ptr()),
        .table_width = static_cast<int32_t>(page_table.size(1)),
        .B = B,
        .N = N,
        .H = H,
        .M = M,
        .blocks = device.blocks,
        .scale_log2 = static_cast<float>(scale * 1.4426950408889634),
    };
    bool wide = device.arch == 90 && N * H >= 64;
    STD_CUDA_CHECK(wide ? mla::launch_wgmma(params, device.stream)
                        : mla::launch_mma(params, device.shared, device.arch, device.stream));
    STD_CUDA_CHECK(mla::launch_combine(params, device.arch, device.stream));
    return out;
}

}  // namespace

STABLE_TORCH_LIBRARY(kimi_fx_cuda, m) {
    m.def("mla_schedule(Tensor length, int nodes, int heads) -> Tensor");
    m.def(
        "mla_tree_verify(Tensor q, Tensor pool, Tensor page_table, Tensor length, Tensor rows, Tensor? ancestors, "
        "Tensor schedule, float scale) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(kimi_fx_cuda, CUDA, m) {
    m.impl("mla_schedule", TORCH_BOX(&mla_schedule));
    m.impl("mla_tree_verify", TORCH_BOX(&mla_tree_verify));
}
