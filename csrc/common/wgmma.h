// Warpgroup matrix products of sm_90a, bf16 in and fp32 out: d (+)= a b for 64 rows and a depth of 16.
//
// Operands in shared memory are 64 x 64 boxes of 8 KiB with the 128-byte swizzle, rows of 128 bytes. `a` and the
// `b` of scores run along the depth inside a row; the `b` of values has one depth step a row, columns in the row.

#pragma once

#include <cstdint>

namespace kimi_fx::wgmma {

constexpr int kBox = 64 * 64 * 2;  // bytes

// Depth along the row: the next 16 of the depth are 32 bytes on.
__device__ inline uint64_t along_rows(uint32_t address) {
    return uint64_t(address >> 4 & 0x3fff) | uint64_t(1) << 16 | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
}

// Depth down the rows, every 64 columns in the next box: the next 16 of the depth are 16 rows, 2048 bytes on.
__device__ inline uint64_t down_rows(uint32_t address) {
    return uint64_t(address >> 4 & 0x3fff) | uint64_t(kBox >> 4) << 16 | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
}

// The sums of a product as operands of its assembly: registers of `d` from `i` on, and what the text calls them.
#define KIMI_FX_SUMS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define KIMI_FX_SUMS_8(i) KIMI_FX_SUMS_4(i), KIMI_FX_SUMS_4(i + 4)
#define KIMI_FX_SUMS_16(i) KIMI_FX_SUMS_8(i), KIMI_FX_SUMS_8(i + 8)
#define KIMI_FX_SUMS_32(i) KIMI_FX_SUMS_16(i), KIMI_FX_SUMS_16(i + 16)
#define KIMI_FX_SUMS_64(i) KIMI_FX_SUMS_32(i), KIMI_FX_SUMS_32(i + 32)
#define KIMI_FX_SUMS_128(i) KIMI_FX_SUMS_64(i), KIMI_FX_SUMS_64(i + 64)
#define KIMI_FX_NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define KIMI_FX_NAMES_16 KIMI_FX_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define KIMI_FX_NAMES_32 \
    KIMI_FX_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define KIMI_FX_NAMES_64 \
    KIMI_FX_NAMES_32 \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define KIMI_FX_NAMES_128 \
    KIMI_FX_NAMES_64 \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// Before the first product that touches registers other instructions wrote.
__device__ inline void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most `kPending` of the committed groups are unfinished.
template <int kPending>
__device__ inline void wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// 64 columns, a in shared memory.
__device__ inline void scores(float (&d)[32], uint64_t a, uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{" KIMI_FX_NAMES_32 "}, %32, %33, p, 1, 1, 0, 0;\n}\n"
        : KIMI_FX_SUMS_32(0)
        : "l"(a), "l"(b), "r"(int(add)));
}

// 64 columns, a in registers.
__device__ inline void scores(float (&d)[32], const uint32_t (&a)[4], uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{" KIMI_FX_NAMES_32 "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}\n"
        : KIMI_FX_SUMS_32(0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)));
}

// 128 columns, a in registers, b down the rows.
__device__ inline void values(float (&d)[64], const uint32_t (&a)[4], uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{" KIMI_FX_NAMES_64 "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}\n"
        : KIMI_FX_SUMS_64(0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)));
}

// 256 columns, a in shared memory, b down the rows.
__device__ inline void values(float (&d)[128], uint64_t a, uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
        "{" KIMI_FX_NAMES_128 "}, %128, %129, p, 1, 1, 0, 1;\n}\n"
        : KIMI_FX_SUMS_128(0)
        : "l"(a), "l"(b), "r"(int(add)));
}

// 256 columns, a in registers, b down the rows.
__device__ inline void values(float (&d)[128], const uint32_t (&a)[4], uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %133, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
        "{" KIMI_FX_NAMES_128 "}, {%128, %129, %130, %131}, %132, p, 1, 1, 1;\n}\n"
        : KIMI_FX_SUMS_128(0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)));
}

}  // namespace kimi_fx::wgmma
