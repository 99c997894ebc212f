// The quick paths of AdamW, on a processor: quotients and roots have the bits of `/` and sqrt, and
// rows those of the usual way, with estimates that are off as far as a GPU's may be. What is wrong is counted.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "../../../csrc/float16.h"

static int g_off = 0;  // units in the last place
static float off_by(float x) { return zero_kernels::bits_float(zero_kernels::float_bits(x) + g_off); }
#define ZK_NEAR(x) off_by(x)

#include "warp.h"

using namespace zero_kernels;

static uint32_t g_state = 1;
static uint32_t draw() { return g_state = mixed(g_state + 0x9e3779b9); }
static float drawn(int least, int most) {  // positive, of an exponent between the two
  return bits_float(uint32_t(127 + least + int(draw() % uint32_t(most - least + 1))) << 23 | draw() >> 9);
}

static uint64_t wrong_decoded() {
  Decoded decoded = make_decoded();
  uint64_t wrong = 0;
  for (int q = -128; q < 128; ++q) {
    wrong += float_bits(decoded.int8[q & 0xff]) != float_bits(unscaled_int8(float(q)));
    wrong += float_bits(decoded.root8[q + 128]) != float_bits(over_255(float(q + 128)));
  }
  return wrong;
}

static uint64_t wrong_roots() {
  uint64_t wrong = 0;
  for (int exponent : {-100, -99, -50, -1, 0, 1, 18, 19})
    for (uint32_t fraction = 0; fraction < 1u << 23; ++fraction) {
      float x = bits_float(uint32_t(127 + exponent) << 23 | fraction);
      wrong += float_bits(quick_root(x)) != float_bits(std::sqrt(x));
    }
  return wrong + (quick_root(0.0f) != 0.0f);
}

// All fractions of a divisor, and of some divisors all of the dividend.
static uint64_t wrong_quotients() {
  uint64_t wrong = 0;
  auto check = [&](float a, float b) {
    wrong += float_bits(quick_quotient(a, b, quick_reciprocal(b))) != float_bits(a / b);
  };
  for (uint32_t fraction = 0; fraction < 1u << 23; ++fraction) {
    check(drawn(-100, 59), bits_float(uint32_t(127 + int(draw() % 50) - 30) << 23 | fraction));
    check(drawn(-50, 9), bits_float(uint32_t(127 - int(draw() % 9)) << 23 | fraction));
  }
  for (int divisor = 0; divisor < 6; ++divisor) {
    float b = divisor == 0 ? 0x1.fffffep-1f : divisor == 1 ? 0x1.000002p-1f : drawn(-9, -1);
    for (uint32_t fraction = 0; fraction < 1u << 23; ++fraction) {
      check(bits_float(127u << 23 | fraction), b);
      check(-bits_float(uint32_t(127 - 100) << 23 | fraction), b * 0x1p19f);
    }
  }
  for (float b : {0x1p-60f, 0x1.fffffep19f}) check(0.0f, b);
  return wrong;
}

// ---- rows ---------------------------------------------------------------------------------------------------------

// Two rows of one warp, with all that an update reads and writes.
struct Rows {
  static constexpr int kNumel = 2 * kRow;
  alignas(32) uint16_t grad[kNumel], param[kNumel];
  alignas(32) float master[kNumel];
  alignas(32) int16_t low16[kNumel];
  alignas(32) int8_t low8[kNumel], m[kNumel];
  alignas(32) uint8_t v[kNumel];
  float scale_m[2], scale_v[2];
  alignas(32) uint16_t m16[kNumel], v16[kNumel];
  alignas(32) float m32[kNumel], v32[kNumel];
};

template <class Way>
static StepArgs shard_of(Rows& rows, const HyperRow* hyper, const int32_t* slots, const float* scale) {
  static const int32_t kKeys[2] = {12345, -77};
  constexpr Form kForm = Way::kForm;
  StepArgs args = {};
  args.grad = rows.grad;
  args.master = Way::kLow == 0   ? static_cast<void*>(rows.master)
                : Way::kLow == 1 ? static_cast<void*>(rows.low8)
                                 : rows.low16;
  args.states[0] = kForm == Form::kInt8    ? static_cast<void*>(rows.m)
                   : kForm == Form::kFloat ? rows.m32
                                           : static_cast<void*>(rows.m16);
  args.states[1] = kForm == Form::kInt8    ? static_cast<void*>(rows.v)
                   : kForm == Form::kFloat ? rows.v32
                                           : static_cast<void*>(rows.v16);
  if (kForm == Form::kInt8) {
    args.scales[0] = rows.scale_m;
    args.scales[1] = rows.scale_v;
  }
  args.param_out = rows.param;
  args.row_slot = slots;
  args.row_keys = kForm == Form::kBFloat16 ? kKeys : nullptr;
  args.hyper = hyper;
  args.grad_scale = scale;
  args.numel = Rows::kNumel;
  args.slots = 2;
  args.vector = true;
  return args;
}

static float normal() {
  float u = float(draw() >> 8 | 1) * 0x1p-24f, angle = float(draw() >> 8) * 0x1p-24f * 6.2831853f;
  return std::sqrt(-2.0f * std::log(u)) * std::cos(angle);
}

static uint16_t bf16(float x) {
  BFloat16 narrowed;
  narrow(x, &narrowed);
  return narrowed.bits;
}

// kind 0: as in a training, normal gradients and the usual options; 1: of any magnitude; 2: with planted values; 3:
// rows of zeros, or almost.
static void fill(Rows& rows, int kind) {
  static const float kPlanted[] = {0.0f,      -0.0f,      INFINITY, -INFINITY, NAN,       0x1p-126f, 0x1p-149f,
                                   0x1p-100f, 0x1p-101f,  0x1p60f,  0x1p126f,  0x1p127f,  3.4e38f,   -3.4e38f,
                                   0x1p-60f,  0x1.8p-99f, 1e-20f,   1e20f,     0x1p-133f, 0x1p10f};
  int spread = kind == 1 ? 60 : 6;
  float turned = kind != 3 ? 1.0f : draw() % 4 == 0 ? -1.0f : draw() % 4 == 0 ? 0x1p-20f : 1.0f;
  for (int row = 0; row < 2; ++row) {
    rows.scale_m[row] = draw() % 16 == 0 ? 0.0f : kind == 1 ? drawn(-60, 12) : drawn(-11, -9);
    rows.scale_v[row] = draw() % 16 == 0 ? 0.0f : kind == 1 ? drawn(-48, 9) : drawn(-10, -8);
    if (kind == 3) rows.scale_m[row] = draw() % 2 ? 0.0f : 0x1p-98f, rows.scale_v[row] = draw() % 2 ? 0.0f : 0x1p-49f;
  }
  for (int i = 0; i < Rows::kNumel; ++i) {
    float g = kind == 1 ? drawn(-45, 12 - 8 * int(draw() % 8)) * (draw() % 2 ? 1 : -1) : normal() * 0x1p-10f,
          p = drawn(-spread - 3, 3) * (draw() % 2 ? 1 : -1);
    if (kind == 2 && draw() % 256 == 0) g = kPlanted[draw() % 20];
    if (kind == 2 && draw() % 256 == 0) p = kPlanted[draw() % 20];
    if (kind == 3 && draw() % 128) g = draw() % 2 ? 0.0f : -0.0f;
    bool zero = kind == 3 && draw() % 2;
    if (zero) p = draw() % 2 ? 0.0f : -0.0f;
    rows.grad[i] = bf16(g);
    rows.param[i] = bf16(p);
    rows.master[i] = p;
    rows.low16[i] = zero ? 0 : int16_t(draw());
    rows.low8[i] = zero ? 0 : int8_t(draw());
    rows.m[i] = rows.scale_m[i / kRow] == 0.0f ? 0 : kind == 3 ? draw() % 3 - 1 : int8_t(int(draw() % 255) - 127);
    rows.v[i] = rows.scale_v[i / kRow] == 0.0f ? 0 : kind == 3 ? draw() % 2 : draw();
    // The same moments, or planted ones, in 16 and 32 bits.
    float m = unscaled_int8(float(rows.m[i])) * rows.scale_m[i / kRow];
    float v = decoded_root8(float(rows.v[i]), rows.scale_v[i / kRow]);
    if (kind == 2 && draw() % 256 == 0) m = kPlanted[draw() % 20];
    if (kind == 2 && draw() % 256 == 0) v = kPlanted[draw() % 20];
    m *= turned;
    rows.m16[i] = bf16(rows.m32[i] = m);
    rows.v16[i] = bf16(rows.v32[i] = v);
  }
}

static HyperRow hyper_row(int kind) {
  bool usual = kind == 0 || draw() % 2;
  float beta1 = usual || draw() % 8 ? 0.9f : 0.0f, beta2 = draw() % 2 ? 0.999f : 0.95f;
  float eps = usual || draw() % 8 ? 1e-8f : drawn(-70, 3);
  float correction = std::sqrt(1.0f - std::pow(beta2, float(1 + draw() % 100)));
  float decay = 1.0f - 1e-3f * float(draw() % 3), weight = draw() % 4 ? 0.0f : 0.01f;
  float step = kind == 2 && draw() % 8 == 0 ? 1e10f : drawn(-14, -3);
  if (kind == 2 && draw() % 4 == 0) step = 1.1117f, eps = 1.0f;  // of 3.4e38: to what bf16 rounds to inf
  return {
      {step, decay, weight, eps, beta1, 1.0f - beta1, beta2, 1.0f - beta2, correction},
      1.0f,
      draw() % 4 ? 1.0f : -1.0f,
      1.0f};
}

template <class Way>
static void check_rows(int kind, int count, uint64_t& quick, uint64_t& wrong) {
  Stored stored = {DType::kBFloat16, DType::kBFloat16, true, Way::kLow, {Way::kForm, Way::kForm, Form::kFloat}};
  if (Way::kForm == Form::kInt8) stored.forms[1] = Form::kRoot8;
  for (int n = 0; n < count; ++n) {
    static Rows rows, by_quick;
    HyperRow hyper[2] = {hyper_row(kind), hyper_row(kind)};
    int32_t slots[2] = {int32_t(draw() % 2), int32_t(draw() % 2)};
    float scale = draw() % 2 ? 1.0f : drawn(-3, 0);
    fill(rows, kind);
    std::memcpy(&by_quick, &rows, sizeof rows);
    if (!quick_rows<Way>(shard_of<Way>(by_quick, hyper, slots, &scale), 0)) continue;
    ++quick;
    int off = g_off;
    g_off = 0;
    step_rows<AdamW>(stored, shard_of<Way>(rows, hyper, slots, &scale), 0, true);
    g_off = off;
    wrong += std::memcmp(&by_quick, &rows, sizeof rows) != 0;
  }
}

template <class... Ways>
static void check_ways(OneOf<Ways...>, int kind, int count, uint64_t* quick, uint64_t& wrong) {
  (check_rows<Ways>(kind, count, quick[int(Ways::kForm)], wrong), ...);
}

// Prints how many quotients and roots are wrong, then for each kind of rows how many went the quick path, of `count`
// for each way and each error, with fp32, bf16 and int8 moments; and how many of all are wrong.
int main(int argc, char** argv) {
  int count = argc > 1 ? std::atoi(argv[1]) : 2000;
  uint64_t wrong = 0;
  wrong = wrong_decoded() + wrong_roots() + wrong_quotients();
  std::printf("%llu\n", (unsigned long long)wrong);
  for (int kind = 0; kind < 4; ++kind) {
    uint64_t quick[4] = {};
    wrong = 0;
    for (g_off = -2; g_off <= 2; ++g_off) check_ways(QuickWays(), kind, count, quick, wrong);
    for (Form form : {Form::kFloat, Form::kBFloat16, Form::kInt8})
      std::printf("%llu ", (unsigned long long)quick[int(form)]);
    std::printf("%llu\n", (unsigned long long)wrong);
  }
}
