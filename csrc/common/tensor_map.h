// Descriptions, for the tensor copy engine of sm_90, of rows of bf16 that are read in boxes of 64 x 64 with the
// 128-byte swizzle.

#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace kimi_fx {

// `outer` times `rows` rows of so many columns, evenly `stride` elements apart. False where the driver refuses.
inline bool encode_rows(CUtensorMap& map, const void* base, uint64_t columns, uint64_t stride, uint64_t rows,
                        uint64_t outer) {
    static const auto encode_tiled = [] {
        void* entry = nullptr;
        cudaDriverEntryPointQueryResult found;
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
        return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
    }();
    cuuint64_t size[3] = {columns, rows, outer}, apart[2] = {stride * 2, stride * 2 * rows};
    cuuint32_t box[3] = {64, 64, 1}, step[3] = {1, 1, 1};
    return encode_tiled != nullptr &&
           encode_tiled(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(base), size, apart, box, step,
                        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace kimi_fx
