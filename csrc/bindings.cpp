// The library's operators on the LibTorch stable ABI, target 2.11: checks, allocation, current stream.
//
// They are `kimi_fx_cuda::…`; the operators the graphs call are `kimi_fx::…` of kimi_fx/ops, whose CUDA kernels call
// these where dtype and widths fit. Schemas take no out arguments: nothing aliases, and only `commit` mutates.
// Long because all operators but those of a layer's products (layer/operators.cpp) are here, each with its checks.

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <optional>
#include <string>
#include <tuple>

#include "mla/launch.h"
#include "mla/schedule.h"
#include "moe/launch.h"
#include "round/build_tree.h"
#include "round/chunk.h"
#include "round/commit.h"
#include "round/draft_attention.h"
#include "round/peer_sum.h"
#include "round/sample_and_walk.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
namespace mla = kimi_fx::mla;
namespace moe = kimi_fx::moe;
namespace rounds = kimi_fx::round;

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

void check_shape(const Tensor& x, const char* name, ScalarType type, std::initializer_list<int64_t> shape) {
    check(x, name, type, static_cast<int64_t>(shape.size()));
    bool same = true;
    std::string wanted, found;
    for (const int64_t& size : shape) {
        const char* comma = wanted.empty() ? "" : ", ";
        int64_t actual = x.size(&size - shape.begin());
        wanted += comma + std::to_string(size), found += comma + std::to_string(actual);
        same &= actual == size;
    }
    STD_TORCH_CHECK(same, name, ": wanted [", wanted, "], found [", found, "].");
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
                    "rows of 512 + 64 columns and pages of 64 tokens are built, found q of ", q.size(3),
                    " columns and pages of ", pool.size(1), " x ", pool.size(2), ".");
    STD_TORCH_CHECK(!ancestors || N <= mla::kMaxTree, "a tree has at most 128 nodes, found ", N, ".");
    STD_TORCH_CHECK(schedule.size(0) == mla::schedule_size(B, N, H), "the schedule is of another shape.");
    STD_TORCH_CHECK(page_table.size(0) == B && length.size(0) == B && rows.size(0) == B && rows.size(1) == N &&
                        rows.size(2) == mla::kRow && pool.size(0) > 0,
                    "page_table, length or rows do not fit q of ", B, " requests and ", N, " nodes.");
    STD_TORCH_CHECK(!ancestors || (ancestors->size(0) == B && ancestors->size(1) == N && ancestors->size(2) == 2),
                    "ancestors do not fit q of ", B, " requests and ", N, " nodes.");

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

void check_packed(const Tensor& x, const char* name, ScalarType type, int64_t E, int64_t rows, int64_t columns) {
    check(x, name, type, 3);
    STD_TORCH_CHECK(x.size(0) == E && x.size(1) == rows && x.size(2) == columns, name, ": wanted [", E, ", ", rows,
                    ", ", columns, "], found [", x.size(0), ", ", x.size(1), ", ", x.size(2), "].");
}

Tensor marlin_moe(const Tensor& x, const Tensor& w13, const Tensor& s13, const Tensor& w2, const Tensor& s2,
                  const Tensor& weights, const Tensor& order, const Tensor& offsets, const Tensor& counters) {
    check(x, "x", ScalarType::BFloat16, 2);
    check(counters, "counters", ScalarType::Int, 1);
    check(weights, "weights", ScalarType::Float, 2);
    check(order, "order", ScalarType::Int, 1);
    check(offsets, "offsets", ScalarType::Int, 1);
    int64_t T = x.size(0), D = x.size(1), k = weights.size(1), E = offsets.size(0) - 1, I = w13.size(2) / 4;
    STD_TORCH_CHECK(D % moe::kColumns == 0 && I % moe::kColumns == 0 && I > 0 && I <= moe::kMaxInner && E >= 1 &&
                        E <= moe::kMaxExperts,
                    "widths in multiples of ", moe::kColumns, ", an expert's at most ", moe::kMaxInner, ", and at most ",
                    moe::kMaxExperts, " experts are built, found a model width of ", D, ", an expert width of ", I,
                    " and ", E, " experts.");
    check_packed(w13, "w13", ScalarType::Int, E, D / 16, 4 * I);
    check_packed(s13, "s13", ScalarType::BFloat16, E, D / moe::kGroup, 2 * I);
    check_packed(w2, "w2", ScalarType::Int, E, I / 16, 2 * D);
    check_packed(s2, "s2", ScalarType::BFloat16, E, I / moe::kGroup, D);
    STD_TORCH_CHECK(weights.size(0) == T && order.size(0) == T * k, "x has ", T, " tokens, weights ", weights.size(0),
                    " rows of ", k, " and order ", order.size(0), " pairs: they disagree.");

    torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
    Device device = device_of(x);
    Tensor result = torch::stable::new_empty(x, {T, D});
    if (T * k == 0) return torch::stable::zero_(result);
    moe::Params params{
        .x = data<uint4>(x),
        .w13 = data<uint4>(w13),
        .s13 = data<uint4>(s13),
        .w2 = data<uint4>(w2),
        .s2 = data<uint4>(s2),
        .weights = data<float>(weights),
        .order = data<int32_t>(order),
        .offsets = data<int32_t>(offsets),
        .out = static_cast<__nv_bfloat16*>(result.mutable_data_ptr()),
        .T = static_cast<int32_t>(T),
        .k = static_cast<int32_t>(k),
        .E = static_cast<int32_t>(E),
        .D = static_cast<int32_t>(D),
        .I = static_cast<int32_t>(I),
    };
    STD_CUDA_CHECK(moe::plan(params, x.get_device_index()));
    STD_TORCH_CHECK(counters.size(0) >= moe::counters_size(params), moe::counters_size(params),
                    " counters or more were wanted, found ", counters.size(0), ".");
    Tensor between = torch::stable::new_empty(weights, {moe::between_size(params)});
    Tensor rows = torch::stable::new_empty(x, {T * k, D});
    params.counters = static_cast<int32_t*>(const_cast<void*>(counters.const_data_ptr()));
    params.between = static_cast<float*>(between.mutable_data_ptr());
    params.rows = static_cast<__nv_bfloat16*>(rows.mutable_data_ptr());
    STD_CUDA_CHECK(moe::launch_experts(params, device.arch, device.stream));
    STD_CUDA_CHECK(moe::launch_weighted_sum(params, device.arch, device.stream));
    return result;
}

// ---- the round ----

template <typename T>
T* out(Tensor& x) {
    return static_cast<T*>(x.mutable_data_ptr());
}

using Tree = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Tree build_tree(const Tensor& logits, const Tensor& anchor, const Tensor& budget, const Tensor& width, int64_t nodes,
                int64_t max_width) {
    check(logits, "logits", ScalarType::Float, 3);
    int64_t B = logits.size(0), D = logits.size(1), V = logits.size(2), k = std::min({max_width, nodes, V});
    check_shape(anchor, "anchor", ScalarType::Long, {B});
    check_shape(budget, "budget", ScalarType::Long, {B});
    check_shape(width, "width", ScalarType::Long, {B});
    STD_TORCH_CHECK(nodes >= 1 && nodes <= rounds::kMaxNodes && D <= rounds::kMaxDepth && k >= 1 &&
                        V <= rounds::kMaxVocabulary,
                    "a tree of ", nodes, " nodes, ", D, " levels and ", V, " ids was asked for: at most ",
                    rounds::kMaxNodes, ", ", rounds::kMaxDepth, " and ", rounds::kMaxVocabulary, " are built.");
    torch::stable::accelerator::DeviceGuard guard(logits.get_device_index());
    Device device = device_of(logits);
    int64_t chunks = rounds::row_chunks(V);
    Tensor keys = torch::stable::new_empty(anchor, {B, D, k, chunks});
    Tensor sums = torch::stable::new_empty(logits, {B, D, chunks, 2});
    Tensor token = torch::stable::new_empty(anchor, {B, nodes}), parent = torch::stable::new_empty(anchor, {B, nodes});
    Tensor depth = torch::stable::new_empty(anchor, {B, nodes}), score = torch::stable::new_empty(logits, {B, nodes});
    Tensor ancestors = torch::stable::new_empty(anchor, {B, nodes, 2});
    Tensor valid = torch::stable::new_empty(anchor, {B, nodes}, ScalarType::Bool);
    if (B == 0) return {token, parent, depth, score, ancestors, valid};
    rounds::TreeParams params{
        .logits = data<float>(logits),
        .anchor = data<int64_t>(anchor),
        .budget = data<int64_t>(budget),
        .width = data<int64_t>(width),
        .keys = out<uint64_t>(keys),
        .sums = out<void>(sums),
        .token = out<int64_t>(token),
        .parent = out<int64_t>(parent),
        .depth = out<int64_t>(depth),
        .score = out<float>(score),
        .ancestors = out<uint64_t>(ancestors),
        .valid = out<bool>(valid),
        .B = static_cast<int>(B),
        .D = static_cast<int>(D),
        .V = static_cast<int>(V),
        .N = static_cast<int>(nodes),
        .k = static_cast<int>(k),
    };
    STD_CUDA_CHECK(rounds::launch_build_tree(params, device.arch, device.stream));
    return {token, parent, depth, score, ancestors, valid};
}

using Emitted = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Emitted sample_and_walk(const Tensor& logits, const Tensor& token, const Tensor& parent, const Tensor& position,
                        const Tensor& active, int64_t rows, const Tensor& temperature, const Tensor& top_k,
                        const Tensor& top_p, const Tensor& min_p, const Tensor& presence, const Tensor& frequency,
                        const Tensor& repetition, const Tensor& bias, const Tensor& counts, const Tensor& seen,
                        const Tensor& seed, const Tensor& sample, const Tensor& logprobs, const Tensor& stop_ids,
                        const Tensor& remaining, const Tensor& min_remaining) {
    check(logits, "logits", ScalarType::Float, 3);
    check(stop_ids, "stop_ids", ScalarType::Long, 2);
    int64_t B = logits.size(0), N = logits.size(1), V = logits.size(2), stops = stop_ids.size(1);
    check_shape(token, "token", ScalarType::Long, {B, N});
    check_shape(parent, "parent", ScalarType::Long, {B, N});
    check_shape(position, "position", ScalarType::Long, {B});
    check_shape(active, "active", ScalarType::Bool, {B});
    check_shape(temperature, "temperature", ScalarType::Float, {B});
    check_shape(top_k, "top_k", ScalarType::Long, {B});
    check_shape(top_p, "top_p", ScalarType::Float, {B});
    check_shape(min_p, "min_p", ScalarType::Float, {B});
    check_shape(presence, "presence", ScalarType::Float, {B});
    check_shape(frequency, "frequency", ScalarType::Float, {B});
    check_shape(repetition, "repetition", ScalarType::Float, {B});
    check_shape(bias, "bias", ScalarType::Float, {B, V});
    check_shape(counts, "counts", ScalarType::Int, {B, V});
    check_shape(seen, "seen", ScalarType::Bool, {B, V});
    check_shape(seed, "seed", ScalarType::Long, {B, 2});
    check_shape(sample, "sample", ScalarType::Long, {B});
    check_shape(logprobs, "logprobs", ScalarType::Int, {B});
    check_shape(stop_ids, "stop_ids", ScalarType::Long, {B, stops});
    check_shape(remaining, "remaining", ScalarType::Long, {B});
    check_shape(min_remaining, "min_remaining", ScalarType::Long, {B});
    STD_TORCH_CHECK(N >= 1 && V >= 1 && rows >= 1, rows, " tokens of ", N, " nodes and ", V,
                    " ids were asked for: at least one of each is needed.");
    STD_TORCH_CHECK(rows <= rounds::kMaxRows && stops <= rounds::kMaxStops && V <= rounds::kMaxVocabulary, rows,
                    " tokens of ", V, " ids and ", stops, " stop ids were asked for: at most ", rounds::kMaxRows, ", ",
                    rounds::kMaxVocabulary, " and ", rounds::kMaxStops, " are built.");
    torch::stable::accelerator::DeviceGuard guard(logits.get_device_index());
    Device device = device_of(logits);
    constexpr int64_t kTop = rounds::kAlternatives;
    int64_t chunks = rounds::row_chunks(V);
    bool spill = B && rounds::slices_spill(B, V, N, device.shared, device.arch, device.blocks);
    int64_t ahead = B ? rounds::nodes_ahead(B, N, device.arch, device.blocks) : 0;
    Tensor slices = torch::stable::new_empty(logits, {spill ? B * std::max<int64_t>(ahead, 1) : 0, (V + 3) / 4 * 4});
    Tensor drawn = torch::stable::new_empty(token, {B, ahead}, ScalarType::Int);
    Tensor keys = torch::stable::new_empty(token, {B, rows, kTop, chunks});
    Tensor sums = torch::stable::new_empty(logits, {B, rows, chunks, 2});
    Tensor arrived = torch::stable::new_empty(token, {B, rows}, ScalarType::Int);
    Tensor tokens = torch::stable::new_empty(token, {B, rows}), count = torch::stable::new_empty(token, {B});
    Tensor path = torch::stable::new_empty(token, {B, rows}), finish = torch::stable::new_empty(token, {B});
    Tensor logprob = torch::stable::new_empty(logits, {B, rows});
    Tensor top_ids = torch::stable::new_empty(token, {B, rows, kTop});
    Tensor top_logprobs = torch::stable::new_empty(logits, {B, rows, kTop});
    if (B == 0) return {tokens, count, path, finish, logprob, top_ids, top_logprobs};
    rounds::WalkParams params{
        .logits = data<float>(logits),
        .token = data<int64_t>(token),
        .parent = data<int64_t>(parent),
        .position = data<int64_t>(position),
        .active = data<bool>(active),
        .temperature = data<float>(temperature),
        .top_k = data<int64_t>(top_k),
        .top_p = data<float>(top_p),
        .min_p = data<float>(min_p),
        .presence = data<float>(presence),
        .frequency = data<float>(frequency),
        .repetition = data<float>(repetition),
        .bias = data<float>(bias),
        .counts = data<int32_t>(counts),
        .seen = data<bool>(seen),
        .seed = data<int64_t>(seed),
        .sample = data<int64_t>(sample),
        .logprobs = data<int32_t>(logprobs),
        .stop_ids = data<int64_t>(stop_ids),
        .remaining = data<int64_t>(remaining),
        .min_remaining = data<int64_t>(min_remaining),
        .slices = spill ? out<float>(slices) : nullptr,
        .drawn = out<int32_t>(drawn),
        .keys = out<uint64_t>(keys),
        .sums = out<void>(sums),
        .arrived = out<int32_t>(arrived),
        .tokens = out<int64_t>(tokens),
        .count = out<int64_t>(count),
        .path = out<int64_t>(path),
        .finish = out<int64_t>(finish),
        .logprob = out<float>(logprob),
        .top_ids = out<int64_t>(top_ids),
        .top_logprobs = out<float>(top_logprobs),
        .B = static_cast<int>(B),
        .N = static_cast<int>(N),
        .V = static_cast<int>(V),
        .A = static_cast<int>(rows),
        .stops = static_cast<int>(stops),
        .ahead = static_cast<int>(ahead),
    };
    STD_CUDA_CHECK(rounds::launch_walk(params, device.arch, device.blocks, device.stream));
    STD_CUDA_CHECK(rounds::launch_logprobs(params, device.arch, device.stream));
    return {tokens, count, path, finish, logprob, top_ids, top_logprobs};
}

// `pool` [layers, P, 64, row…] and what goes into it, [layers, B, n, row] with a row in one piece.
rounds::Rows rows_of(Tensor& pool, const Tensor& rows, const char* name, int64_t B, int64_t n) {
    STD_TORCH_CHECK(pool.is_cuda() && pool.is_contiguous() && pool.dim() >= 4 && pool.size(2) == mla::kPage &&
                        rows.is_cuda() && rows.dim() == 4 && pool.scalar_type() == rows.scalar_type(),
                    name, ": wanted rows of 4 dimensions for a contiguous pool of the same dtype in pages of 64.");
    int64_t layers = pool.size(0), row = 1, width = rows.size(3) * rows.element_size();
    for (int dim = 3; dim < pool.dim(); ++dim) row *= pool.size(dim);
    STD_TORCH_CHECK(rows.size(0) == layers && rows.size(1) == B && rows.size(2) == n && rows.size(3) == row, name,
                    ": wanted [", layers, ", ", B, ", ", n, ", ", row, "], found [", rows.size(0), ", ", rows.size(1),
                    ", ", rows.size(2), ", ", rows.size(3), "].");
    auto piece = [&](int64_t dim) { return rows.stride(dim) * static_cast<int64_t>(rows.element_size()) / 16; };
    bool whole = rows.stride(3) == 1 && width % 16 == 0;
    for (int dim = 0; dim < 3; ++dim) whole &= rows.stride(dim) * rows.element_size() % 16 == 0;
    STD_TORCH_CHECK(!layers || whole, name, ": wanted rows in pieces of 16 bytes, found rows of ", width, ".");
    return {out<uint4>(pool), data<uint4>(rows), pool.size(1), piece(0), piece(1), piece(2),
            static_cast<int>(layers), static_cast<int>(width / 16)};
}

void commit(Tensor pool, Tensor draft_k, Tensor draft_v, Tensor anchor, Tensor length, Tensor active, Tensor counts,
            Tensor seen, Tensor remaining, Tensor min_remaining, const Tensor& page_table, const Tensor& rows,
            const Tensor& k, const Tensor& v, const Tensor& path, const Tensor& kept, const Tensor& tokens,
            const Tensor& count, const Tensor& finish, const Tensor& running) {
    check(counts, "counts", ScalarType::Int, 2);
    check(page_table, "page_table", ScalarType::Int, 2);
    check(path, "path", ScalarType::Long, 2);
    check(tokens, "tokens", ScalarType::Long, 2);
    int64_t B = counts.size(0), V = counts.size(1), A = path.size(1);
    check_shape(anchor, "anchor", ScalarType::Long, {B});
    check_shape(length, "length", ScalarType::Int, {B});
    check_shape(active, "active", ScalarType::Bool, {B});
    check_shape(seen, "seen", ScalarType::Bool, {B, V});
    check_shape(remaining, "remaining", ScalarType::Long, {B});
    check_shape(min_remaining, "min_remaining", ScalarType::Long, {B});
    check_shape(page_table, "page_table", ScalarType::Int, {B, page_table.size(1)});
    check_shape(path, "path", ScalarType::Long, {B, A});
    check_shape(kept, "kept", ScalarType::Long, {B});
    check_shape(tokens, "tokens", ScalarType::Long, {B, tokens.size(1)});
    check_shape(count, "count", ScalarType::Long, {B});
    check_shape(finish, "finish", ScalarType::Long, {B});
    check_shape(running, "running", ScalarType::Bool, {B});
    rounds::Rows target = rows_of(pool, rows, "rows", B, rows.size(2));
    rounds::Rows own_k = rows_of(draft_k, k, "k", B, A), own_v = rows_of(draft_v, v, "v", B, A);
    STD_TORCH_CHECK(own_k.layers == own_v.layers, "k has ", own_k.layers, " layers and v ", own_v.layers, ".");
    torch::stable::accelerator::DeviceGuard guard(pool.get_device_index());
    if (B == 0) return;
    Device device = device_of(pool);
    rounds::CommitParams params{
        .target = target,
        .draft_k = own_k,
        .draft_v = own_v,
        .anchor = out<int64_t>(anchor),
        .length = out<int32_t>(length),
        .active = out<bool>(active),
        .counts = out<int32_t>(counts),
        .seen = out<bool>(seen),
        .remaining = out<int64_t>(remaining),
        .min_remaining = out<int64_t>(min_remaining),
        .page_table = data<int32_t>(page_table),
        .path = data<int64_t>(path),
        .kept = data<int64_t>(kept),
        .tokens = data<int64_t>(tokens),
        .count = data<int64_t>(count),
        .finish = data<int64_t>(finish),
        .running = data<bool>(running),
        .B = static_cast<int>(B),
        .A = static_cast<int>(A),
        .V = static_cast<int>(V),
        .table_width = static_cast<int>(page_table.size(1)),
        .emitted = static_cast<int>(tokens.size(1)),
    };
    STD_CUDA_CHECK(rounds::launch_commit(params, device.arch, device.stream));
}

Tensor draft_attention(const Tensor& q, const Tensor& pool_k, const Tensor& pool_v, const Tensor& page_table,
                       const Tensor& length, const Tensor& k, const Tensor& v, double scale, int64_t window,
                       bool causal) {
    check(q, "q", ScalarType::BFloat16, 4);
    check(pool_k, "pool_k", ScalarType::BFloat16, 4);
    check(pool_v, "pool_v", ScalarType::BFloat16, 4);
    check(page_table, "page_table", ScalarType::Int, 2);
    check(length, "length", ScalarType::Int, 1);
    check(k, "k", ScalarType::BFloat16, 4);
    STD_TORCH_CHECK(v.is_cuda() && v.scalar_type() == ScalarType::BFloat16 && v.dim() == 4 && v.stride(3) == 1 &&
                        v.stride(2) == v.size(3) && v.stride(0) == v.size(1) * v.stride(1) && v.stride(1) % 8 == 0,
                    "v: wanted a CUDA tensor of 4 dimensions in bf16, its slots evenly apart by a multiple of 8.");
    int64_t B = q.size(0), S = q.size(1), H = q.size(2), KV = k.size(2), head = q.size(3);
    STD_TORCH_CHECK((head == 64 || head == 128) && S <= rounds::kMaxSlots && KV > 0 && H > 0 && H % KV == 0,
                    "heads of 64 or 128 columns and blocks of at most ", rounds::kMaxSlots, " slots are built, found ",
                    head, " and ", S, ".");
    for (const Tensor* pool : {&pool_k, &pool_v}) {
        STD_TORCH_CHECK(pool->size(1) == mla::kPage && pool->size(2) == KV && pool->size(3) == head,
                        "pages of 64 x ", KV, " x ", head, " fit k, found ", pool->size(1), " x ", pool->size(2), " x ",
                        pool->size(3), ".");
    }
    for (const Tensor* own : {&k, &v}) {
        STD_TORCH_CHECK(own->size(0) == B && own->size(1) == S && own->size(2) == KV && own->size(3) == head,
                        "k and v do not fit q of ", B, " requests and ", S, " slots.");
    }
    STD_TORCH_CHECK(page_table.size(0) == B && length.size(0) == B && window >= 0,
                    "page_table or length do not fit ", B, " requests, or the window of ", window, " is negative.");
    torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
    if (B * S == 0) return torch::stable::new_empty(q, {B, S, H, head});
    Device device = device_of(q);
    Tensor result = torch::stable::new_empty(q, {B, S, H, head});
    rounds::DraftParams params{
        .q = data<__nv_bfloat16>(q),
        .pool_k = data<__nv_bfloat16>(pool_k),
        .pool_v = data<__nv_bfloat16>(pool_v),
        .page_table = data<int32_t>(page_table),
        .length = data<int32_t>(length),
        .k = data<__nv_bfloat16>(k),
        .v = data<__nv_bfloat16>(v),
        .out = out<__nv_bfloat16>(result),
        .v_stride = v.stride(1),
        .table_width = static_cast<int>(page_table.size(1)),
        .B = static_cast<int>(B),
        .S = static_cast<int>(S),
        .H = static_cast<int>(H),
        .KV = static_cast<int>(KV),
        .head = static_cast<int>(head),
        .window = static_cast<int>(std::min<int64_t>(window, INT32_MAX)),
        .causal = causal,
        .scale_log2 = static_cast<float>(scale * 1.4426950408889634),
    };
    params.splits = rounds::draft_splits(params, device.arch, device.blocks, device.shared);
    int64_t splits = params.splits;
    Tensor partial_o = torch::stable::new_empty(q, {B, KV, splits, S * (H / KV), head}, ScalarType::Half);
    Tensor partial_lse = torch::stable::new_empty(q, {B, KV, S * (H / KV), splits}, ScalarType::Float);
    params.partial_o = out<__half>(partial_o), params.partial_lse = out<float>(partial_lse);
    STD_CUDA_CHECK(rounds::launch_draft_attention(params, device.arch, device.stream));
    return result;
}

Tensor peer_sum(const Tensor& x, const Tensor& buffers, int64_t rank, int64_t capacity) {
    bool f32 = x.scalar_type() == ScalarType::Float;
    check(x, "x", f32 ? ScalarType::Float : ScalarType::BFloat16, x.dim());
    check(buffers, "buffers", ScalarType::Long, 1);
    int64_t ranks = buffers.size(0), bytes = x.numel() * (f32 ? 4 : 2);
    STD_TORCH_CHECK(1 < ranks && ranks <= rounds::kPeers && 0 <= rank && rank < ranks, "rank ", rank, " of ", ranks,
                    " is not one of 2 to ", rounds::kPeers, " ranks.");
    STD_TORCH_CHECK(bytes <= capacity && bytes % 16 == 0 && capacity % 16 == 0 && capacity < int64_t(1) << 32,
                    "a buffer takes multiples of 16 bytes up to ", capacity, ", found ", bytes, ".");
    torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
    Tensor result = torch::stable::empty_like(x);
    if (bytes == 0) return result;
    Device device = device_of(x);
    rounds::PeerSumParams params{
        .x = data<uint4>(x),
        .out = out<uint4>(result),
        .buffers = data<uint8_t*>(buffers),
        .pieces = bytes / 16,
        .capacity = capacity,
        .rank = static_cast<int>(rank),
        .ranks = static_cast<int>(ranks),
        .f32 = f32,
    };
    STD_CUDA_CHECK(rounds::launch_peer_sum(params, device.arch, device.stream));
    return result;
}

}  // namespace

STABLE_TORCH_LIBRARY(kimi_fx_cuda, m) {
    m.def("mla_schedule(Tensor length, int nodes, int heads) -> Tensor");
    m.def(
        "mla_tree_verify(Tensor q, Tensor pool, Tensor page_table, Tensor length, Tensor rows, Tensor? ancestors, "
        "Tensor schedule, float scale) -> Tensor");
    m.def(
        "marlin_moe(Tensor x, Tensor w13, Tensor s13, Tensor w2, Tensor s2, Tensor weights, Tensor order, "
        "Tensor offsets, Tensor counters) -> Tensor");
    m.def(
        "build_tree(Tensor logits, Tensor anchor, Tensor budget, Tensor width, int nodes, int max_width) -> "
        "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
    m.def(
        "sample_and_walk(Tensor logits, Tensor token, Tensor parent, Tensor position, Tensor active, int rows, "
        "Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor presence, Tensor frequency, "
        "Tensor repetition, Tensor bias, Tensor counts, Tensor seen, Tensor seed, Tensor sample, Tensor logprobs, "
        "Tensor stop_ids, Tensor remaining, Tensor min_remaining) -> "
        "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
    m.def(
        "commit(Tensor(a!) pool, Tensor(b!) draft_k, Tensor(c!) draft_v, Tensor(d!) anchor, Tensor(e!) length, "
        "Tensor(f!) active, Tensor(g!) counts, Tensor(h!) seen, Tensor(i!) remaining, Tensor(j!) min_remaining, "
        "Tensor page_table, Tensor rows, Tensor k, Tensor v, Tensor path, Tensor kept, Tensor tokens, Tensor count, "
        "Tensor finish, Tensor running) -> ()");
    m.def(
        "draft_attention(Tensor q, Tensor pool_k, Tensor pool_v, Tensor page_table, Tensor length, Tensor k, Tensor v, "
        "float scale, int window, bool causal) -> Tensor");
    m.def("peer_sum(Tensor x, Tensor buffers, int rank, int capacity) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(kimi_fx_cuda, CUDA, m) {
    m.impl("mla_schedule", TORCH_BOX(&mla_schedule));
    m.impl("mla_tree_verify", TORCH_BOX(&mla_tree_verify));
    m.impl("marlin_moe", TORCH_BOX(&marlin_moe));
    m.impl("build_tree", TORCH_BOX(&build_tree));
    m.impl("sample_and_walk", TORCH_BOX(&sample_and_walk));
    m.impl("commit", TORCH_BOX(&commit));
    m.impl("draft_attention", TORCH_BOX(&draft_attention));
    m.impl("peer_sum", TORCH_BOX(&peer_sum));
}
