// operations.h: what the plain instructions mean, lane by lane.  Included where it is needed with
// ONE, TWO, THREE and FOUR defined:
//   ONE(code, "names", result, operand a, what it yields)   and so on with b, c, d
// where d is called fourth.  Types say how a lane's cell is read; values of 8 and 16 bits lie in
// 32 bit registers.  An .approx instruction yields what the exact one does, rounded.

// ---- moving
ONE(MOV_32, "mov.b32 mov.u32 mov.s32 mov.f32 mov.b16 mov.u16 mov.s16", u32, u32, a)
ONE(MOV_64, "mov.b64 mov.u64 mov.s64 mov.f64", u64, u64, a)
ONE(CVTA, "cvta.to.global.u64 cvta.global.u64 cvta.to.const.u64 cvta.const.u64", u64, u64, a)
ONE(CVTA_SHARED, "cvta.shared.u64", u64, u64, a | CODE_SHARED_WINDOW)
ONE(CVTA_LOCAL, "cvta.local.u64", u64, u64, a | CODE_LOCAL_WINDOW)
ONE(CVTA_PARAM, "cvta.param.u64", u64, u64, a | CODE_PARAM_WINDOW)
ONE(CVTA_TO_SHARED, "cvta.to.shared.u64 cvta.to.local.u64 cvta.to.param.u64", u64, u64,
    a & CODE_WINDOW_OFFSET)

// ---- 32 bit integers
TWO(ADD_32, "add.s32 add.u32", u32, u32, u32, a + b)
TWO(SUB_32, "sub.s32 sub.u32", u32, u32, u32, a - b)
TWO(MUL_32, "mul.lo.s32 mul.lo.u32", u32, u32, u32, a * b)
TWO(MUL_HI_S32, "mul.hi.s32", u32, s32, s32, (uint32_t)((int64_t)a * b >> 32))
TWO(MUL_HI_U32, "mul.hi.u32", u32, u32, u32, (uint32_t)((uint64_t)a * b >> 32))
TWO(DIV_S32, "div.s32", s32, s32, s32, b == 0 ? -1 : b == -1 ? -a : a / b)
TWO(DIV_U32, "div.u32", u32, u32, u32, b == 0 ? UINT32_MAX : a / b)
TWO(REM_S32, "rem.s32", s32, s32, s32, b == 0 ? a : b == -1 ? 0 : a % b)
TWO(REM_U32, "rem.u32", u32, u32, u32, b == 0 ? a : a % b)
TWO(MIN_S32, "min.s32", s32, s32, s32, a < b ? a : b)
TWO(MIN_U32, "min.u32", u32, u32, u32, a < b ? a : b)
TWO(MAX_S32, "max.s32", s32, s32, s32, a > b ? a : b)
TWO(MAX_U32, "max.u32", u32, u32, u32, a > b ? a : b)
TWO(AND_32, "and.b32 and.b16", u32, u32, u32, a & b)
TWO(OR_32, "or.b32 or.b16", u32, u32, u32, a | b)
TWO(XOR_32, "xor.b32 xor.b16", u32, u32, u32, a ^ b)
ONE(NOT_32, "not.b32", u32, u32, ~a)
ONE(NOT_16, "not.b16", u16, u16, (uint16_t)~a)
ONE(NEG_S32, "neg.s32", u32, u32, 0 - a)
ONE(ABS_S32, "abs.s32", s32, s32, a < 0 ? -a : a)
TWO(SHL_32, "shl.b32", u32, u32, u32, b > 31 ? 0 : a << b)
TWO(SHR_U32, "shr.u32 shr.b32", u32, u32, u32, b > 31 ? 0 : a >> b)
TWO(SHR_S32, "shr.s32", s32, s32, u32, a >> (b > 31 ? 31 : b))
THREE(MAD_32, "mad.lo.s32 mad.lo.u32", u32, u32, u32, u32, a * b + c)
THREE(MAD_HI_S32, "mad.hi.s32", u32, s32, s32, u32, (uint32_t)((int64_t)a * b >> 32) + c)
THREE(MAD_HI_U32, "mad.hi.u32", u32, u32, u32, u32, (uint32_t)((uint64_t)a * b >> 32) + c)
THREE(SHF_L_WRAP, "shf.l.wrap.b32", u32, u32, u32, u32,
      (uint32_t)((((uint64_t)b << 32 | a) << (c & 31)) >> 32))
THREE(SHF_R_WRAP, "shf.r.wrap.b32", u32, u32, u32, u32,
      (uint32_t)(((uint64_t)b << 32 | a) >> (c & 31)))
THREE(SHF_L_CLAMP, "shf.l.clamp.b32", u32, u32, u32, u32,
      (uint32_t)((((uint64_t)b << 32 | a) << (c > 32 ? 32 : c)) >> 32))
THREE(SHF_R_CLAMP, "shf.r.clamp.b32", u32, u32, u32, u32,
      (uint32_t)(((uint64_t)b << 32 | a) >> (c > 32 ? 32 : c)))
THREE(PRMT, "prmt.b32", u32, u32, u32, u32, permute_bytes(a, b, c))
THREE(BFE_U32, "bfe.u32", u32, u32, u32, u32,
      (uint32_t)((uint64_t)a >> ((b & 255) > 32 ? 32 : (b & 255)) &
                 (((uint64_t)1 << ((c & 255) > 32 ? 32 : (c & 255))) - 1)))
THREE(BFE_S32, "bfe.s32", s32, s32, u32, u32, extract_signed(a, b & 255, c & 255))
FOUR(BFI_32, "bfi.b32", u32, u32, u32, u32, u32, insert_bits(a, b, c & 255, fourth & 255))
FOUR(LOP3, "lop3.b32", u32, u32, u32, u32, u32, look_up_bits(a, b, c, fourth))
ONE(POPC_32, "popc.b32", u32, u32, (uint32_t)__builtin_popcount(a))
ONE(CLZ_32, "clz.b32", u32, u32, a ? (uint32_t)__builtin_clz(a) : 32)
ONE(BREV_32, "brev.b32", u32, u32, reverse_bits(a))
ONE(BFIND_U32, "bfind.u32", u32, u32, a ? 31 - (uint32_t)__builtin_clz(a) : UINT32_MAX)

// ---- 16 bit integers
TWO(ADD_16, "add.s16 add.u16", u16, u16, u16, (uint16_t)(a + b))
TWO(SUB_16, "sub.s16 sub.u16", u16, u16, u16, (uint16_t)(a - b))
TWO(MUL_16, "mul.lo.s16 mul.lo.u16", u16, u16, u16, (uint16_t)((uint32_t)a * b))
TWO(MIN_S16, "min.s16", s16, s16, s16, a < b ? a : b)
TWO(MAX_S16, "max.s16", s16, s16, s16, a > b ? a : b)
TWO(SHL_16, "shl.b16", u16, u16, u32, (uint16_t)(b > 15 ? 0 : a << b))
TWO(SHR_U16, "shr.u16 shr.b16", u16, u16, u32, (uint16_t)(b > 15 ? 0 : a >> b))
TWO(SHR_S16, "shr.s16", s16, s16, u32, (int16_t)(a >> (b > 15 ? 15 : b)))
THREE(MAD_16, "mad.lo.s16 mad.lo.u16", u16, u16, u16, u16, (uint16_t)((uint32_t)a * b + c))
TWO(MUL_WIDE_S16, "mul.wide.s16", s32, s16, s16, a * b)
TWO(MUL_WIDE_U16, "mul.wide.u16", u32, u16, u16, (uint32_t)a * b)

// ---- 64 bit integers
TWO(ADD_64, "add.s64 add.u64", u64, u64, u64, a + b)
TWO(SUB_64, "sub.s64 sub.u64", u64, u64, u64, a - b)
TWO(MUL_64, "mul.lo.s64 mul.lo.u64", u64, u64, u64, a * b)
TWO(MUL_HI_S64, "mul.hi.s64", s64, s64, s64, (int64_t)((__int128)a * b >> 64))
TWO(MUL_HI_U64, "mul.hi.u64", u64, u64, u64, (uint64_t)((unsigned __int128)a * b >> 64))
TWO(MUL_WIDE_S32, "mul.wide.s32", s64, s32, s32, (int64_t)a * b)
TWO(MUL_WIDE_U32, "mul.wide.u32", u64, u32, u32, (uint64_t)a * b)
TWO(DIV_S64, "div.s64", s64, s64, s64, b == 0 ? -1 : b == -1 ? -a : a / b)
TWO(DIV_U64, "div.u64", u64, u64, u64, b == 0 ? UINT64_MAX : a / b)
TWO(REM_S64, "rem.s64", s64, s64, s64, b == 0 ? a : b == -1 ? 0 : a % b)
TWO(REM_U64, "rem.u64", u64, u64, u64, b == 0 ? a : a % b)
TWO(MIN_S64, "min.s64", s64, s64, s64, a < b ? a : b)
TWO(MIN_U64, "min.u64", u64, u64, u64, a < b ? a : b)
TWO(MAX_S64, "max.s64", s64, s64, s64, a > b ? a : b)
TWO(MAX_U64, "max.u64", u64, u64, u64, a > b ? a : b)
TWO(AND_64, "and.b64", u64, u64, u64, a & b)
TWO(OR_64, "or.b64", u64, u64, u64, a | b)
TWO(XOR_64, "xor.b64", u64, u64, u64, a ^ b)
ONE(NOT_64, "not.b64", u64, u64, ~a)
ONE(NEG_S64, "neg.s64", u64, u64, 0 - a)
ONE(ABS_S64, "abs.s64", s64, s64, a < 0 ? -a : a)
TWO(SHL_64, "shl.b64", u64, u64, u32, b > 63 ? 0 : a << b)
TWO(SHR_U64, "shr.u64 shr.b64", u64, u64, u32, b > 63 ? 0 : a >> b)
TWO(SHR_S64, "shr.s64", s64, s64, u32, a >> (b > 63 ? 63 : b))
THREE(MAD_64, "mad.lo.s64 mad.lo.u64", u64, u64, u64, u64, a * b + c)
THREE(MAD_WIDE_S32, "mad.wide.s32", u64, s32, s32, u64, (uint64_t)((int64_t)a * b) + c)
THREE(MAD_WIDE_U32, "mad.wide.u32", u64, u32, u32, u64, (uint64_t)a * b + c)
ONE(POPC_64, "popc.b64", u32, u64, (uint32_t)__builtin_popcountll(a))
ONE(CLZ_64, "clz.b64", u32, u64, a ? (uint32_t)__builtin_clzll(a) : 64)

// ---- float
TWO(ADD_F32, "add.f32 add.rn.f32", f32, f32, f32, a + b)
TWO(SUB_F32, "sub.f32 sub.rn.f32", f32, f32, f32, a - b)
TWO(MUL_F32, "mul.f32 mul.rn.f32", f32, f32, f32, a * b)
TWO(DIV_F32, "div.rn.f32 div.full.f32 div.approx.f32", f32, f32, f32, a / b)
TWO(MIN_F32, "min.f32", f32, f32, f32, smaller_of(a, b))
TWO(MAX_F32, "max.f32", f32, f32, f32, larger_of(a, b))
THREE(FMA_F32, "fma.rn.f32", f32, f32, f32, f32, fmaf(a, b, c))
TWO(ADD_FTZ, "add.ftz.f32 add.rn.ftz.f32", f32, f32, f32, flush(flush(a) + flush(b)))
TWO(SUB_FTZ, "sub.ftz.f32 sub.rn.ftz.f32", f32, f32, f32, flush(flush(a) - flush(b)))
TWO(MUL_FTZ, "mul.ftz.f32 mul.rn.ftz.f32", f32, f32, f32, flush(flush(a) * flush(b)))
TWO(DIV_FTZ, "div.rn.ftz.f32 div.full.ftz.f32 div.approx.ftz.f32", f32, f32, f32,
    flush(flush(a) / flush(b)))
TWO(MIN_FTZ, "min.ftz.f32", f32, f32, f32, smaller_of(flush(a), flush(b)))
TWO(MAX_FTZ, "max.ftz.f32", f32, f32, f32, larger_of(flush(a), flush(b)))
THREE(FMA_FTZ, "fma.rn.ftz.f32", f32, f32, f32, f32, flush(fmaf(flush(a), flush(b), flush(c))))
ONE(NEG_F32, "neg.f32 neg.ftz.f32", f32, f32, -a)
ONE(ABS_F32, "abs.f32 abs.ftz.f32", f32, f32, fabsf(a))
TWO(COPYSIGN_F32, "copysign.f32", f32, f32, f32, copysignf(b, a))
ONE(RCP_F32, "rcp.rn.f32 rcp.approx.f32", f32, f32, 1 / a)
ONE(RCP_FTZ, "rcp.rn.ftz.f32 rcp.approx.ftz.f32", f32, f32, flush(1 / flush(a)))
ONE(SQRT_F32, "sqrt.rn.f32 sqrt.approx.f32", f32, f32, sqrtf(a))
ONE(SQRT_FTZ, "sqrt.rn.ftz.f32 sqrt.approx.ftz.f32", f32, f32, flush(sqrtf(flush(a))))
ONE(RSQRT_F32, "rsqrt.approx.f32 rsqrt.approx.ftz.f32", f32, f32, 1 / sqrtf(a))
ONE(EX2_F32, "ex2.approx.f32", f32, f32, power_of_two(a))
ONE(EX2_FTZ, "ex2.approx.ftz.f32", f32, f32, flush(power_of_two(flush(a))))
ONE(LG2_F32, "lg2.approx.f32", f32, f32, log2f(a))
ONE(LG2_FTZ, "lg2.approx.ftz.f32", f32, f32, flush(log2f(flush(a))))
ONE(TANH_F32, "tanh.approx.f32", f32, f32, tanhf(a))
ONE(SIN_F32, "sin.approx.f32 sin.approx.ftz.f32", f32, f32, sinf(a))
ONE(COS_F32, "cos.approx.f32 cos.approx.ftz.f32", f32, f32, cosf(a))

// ---- double
TWO(ADD_F64, "add.f64 add.rn.f64", f64, f64, f64, a + b)
TWO(SUB_F64, "sub.f64 sub.rn.f64", f64, f64, f64, a - b)
TWO(MUL_F64, "mul.f64 mul.rn.f64", f64, f64, f64, a * b)
TWO(DIV_F64, "div.rn.f64", f64, f64, f64, a / b)
THREE(FMA_F64, "fma.rn.f64", f64, f64, f64, f64, fma(a, b, c))
ONE(NEG_F64, "neg.f64", f64, f64, -a)
ONE(F64_F32, "cvt.f64.f32", f64, f32, (double)a)
ONE(F32_F64, "cvt.rn.f32.f64", f32, f64, (float)a)

// ---- conversions
ONE(F32_S32, "cvt.rn.f32.s32", f32, s32, (float)a)
ONE(F32_U32, "cvt.rn.f32.u32", f32, u32, (float)a)
ONE(F32_S64, "cvt.rn.f32.s64", f32, s64, (float)a)
ONE(F32_U64, "cvt.rn.f32.u64", f32, u64, (float)a)
ONE(F32_S16, "cvt.rn.f32.s16", f32, s16, (float)a)
ONE(F32_U16, "cvt.rn.f32.u16", f32, u16, (float)a)
ONE(F64_S32, "cvt.rn.f64.s32", f64, s32, (double)a)
ONE(F64_S64, "cvt.rn.f64.s64", f64, s64, (double)a)
ONE(S32_F32_RZI, "cvt.rzi.s32.f32 cvt.rzi.ftz.s32.f32", s32, f32, to_s32(truncf(a)))
ONE(S32_F32_RNI, "cvt.rni.s32.f32 cvt.rni.ftz.s32.f32", s32, f32, to_s32(rintf(a)))
ONE(S32_F32_RMI, "cvt.rmi.s32.f32 cvt.rmi.ftz.s32.f32", s32, f32, to_s32(floorf(a)))
ONE(S32_F32_RPI, "cvt.rpi.s32.f32 cvt.rpi.ftz.s32.f32", s32, f32, to_s32(ceilf(a)))
ONE(U32_F32_RZI, "cvt.rzi.u32.f32 cvt.rzi.ftz.u32.f32", u32, f32, to_u32(truncf(a)))
ONE(S64_F32_RZI, "cvt.rzi.s64.f32", s64, f32, to_s64(truncf(a)))
ONE(F32_RZI, "cvt.rzi.f32.f32", f32, f32, truncf(a))
ONE(F32_RNI, "cvt.rni.f32.f32", f32, f32, rintf(a))
ONE(F32_RMI, "cvt.rmi.f32.f32", f32, f32, floorf(a))
ONE(F32_RPI, "cvt.rpi.f32.f32", f32, f32, ceilf(a))
ONE(F32_SAT, "cvt.sat.f32.f32", f32, f32, a > 0 ? a < 1 ? a : 1 : 0)
ONE(F32_F16, "cvt.f32.f16", f32, u16, float_of_half(a))
ONE(F32_BF16, "cvt.f32.bf16", f32, u16, float_of_bits((uint32_t)a << 16))
ONE(F16_F32, "cvt.rn.f16.f32", u32, f32, half_of_float(a))
ONE(BF16_F32, "cvt.rn.bf16.f32", u32, f32, bfloat_of_float(a))
TWO(F16X2_F32, "cvt.rn.f16x2.f32", u32, f32, f32, half_of_float(a) << 16 | half_of_float(b))
TWO(BF16X2_F32, "cvt.rn.bf16x2.f32", u32, f32, f32, bfloat_of_float(a) << 16 | bfloat_of_float(b))
#define NARROW(type, ctype, result) \
  ONE(result##_U32, "cvt." type ".u32 cvt." type ".u16", result, u32, (ctype)a) \
  ONE(result##_S32, "cvt." type ".s32", result, s32, (ctype)a) \
  ONE(result##_U8, "cvt." type ".u8", result, u8, (ctype)a) \
  ONE(result##_S8, "cvt." type ".s8", result, s8, (ctype)a) \
  ONE(result##_S16, "cvt." type ".s16", result, s16, (ctype)a) \
  ONE(result##_U64, "cvt." type ".u64", result, u64, (ctype)a) \
  ONE(result##_S64, "cvt." type ".s64", result, s64, (ctype)a)
NARROW("u8", uint8_t, u8)
NARROW("s8", int8_t, s8)
NARROW("u16", uint16_t, u16)
NARROW("s16", int16_t, s16)
NARROW("u32", uint32_t, u32)
NARROW("s32", int32_t, s32)
NARROW("u64", uint64_t, u64)
NARROW("s64", int64_t, s64)
#undef NARROW
// of the low half of a 64 bit register, which code.c calls so
ONE(S64_LOW, "low.s64.s32", s64, u64, (int32_t)a)
ONE(U64_LOW, "low.u64.u32", u64, u64, (uint32_t)a)

// ---- two halves of a register
THREE(FMA_F16X2, "fma.rn.f16x2", u32, u32, u32, u32,
      half_of_float(fmaf(float_of_half((uint16_t)a), float_of_half((uint16_t)b),
                         float_of_half((uint16_t)c))) |
      half_of_float(fmaf(float_of_half((uint16_t)(a >> 16)), float_of_half((uint16_t)(b >> 16)),
                         float_of_half((uint16_t)(c >> 16)))) << 16)
THREE(FMA_BF16X2, "fma.rn.bf16x2", u32, u32, u32, u32,
      bfloat_of_float(fmaf(float_of_bits(a << 16), float_of_bits(b << 16),
                           float_of_bits(c << 16))) |
      bfloat_of_float(fmaf(float_of_bits(a & 0xffff0000u), float_of_bits(b & 0xffff0000u),
                           float_of_bits(c & 0xffff0000u))) << 16)
