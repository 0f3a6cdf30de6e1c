// How far two answers to the same question may be apart: one row per operation, with what is
// compared and why the bound is what it is. What is not here must be equal to the bit, or its bound
// follows from the numbers of the test and stands there.
#ifndef VERKV_TESTS_TOLERANCE_HPP
#define VERKV_TESTS_TOLERANCE_HPP

namespace verkv::tolerance {

// A stage's formula in double against its plain form in double, relative. Both round each of up to
// some thousands of terms at 1e-16; conditions of the random cases cost three digits more.
inline constexpr double kFormula = 1e-9;
// An inequality that holds exactly in real numbers, relative: a few hundred roundings of double.
inline constexpr double kInequality = 1e-12;
// One number by two formulas in double, relative, of numbers up to 1 absolute: sums of up to a
// thousand positive terms, each rounded at 1e-16.
inline constexpr double kIdentity = 1e-12;
// A formula of a few operations in double against its closed form, relative, of numbers up to 1
// absolute.
inline constexpr double kClosedForm = 1e-14;
// What is 0 or, of a smallest weight, hardly more, absolute.
inline constexpr double kNothing = 1e-300;
// beta and lambda against the reference, which works with 1 - r, relative: its own rounding is
// 1e-16 / (1 - r), up to 1e-12, and there are up to 200 terms.
inline constexpr double kShrinkage = 1e-10;
// Dense attention in double against the reference's, of the size of the answer and 1: logits up to
// some hundreds, rounded at 1e-16 each of up to 70 terms.
inline constexpr double kAttention = 1e-11;
// fetch_worth on two sides of its corner, a tenth of this away, relative: its slope there is below
// 3.
inline constexpr double kAcross = 1e-11;
// A number in double that was rounded to binary32 on its way, relative, of numbers up to 1
// absolute.
inline constexpr double kThroughBinary32 = 1e-6;
// The levels of the quantisers, which stand with nine digits, absolute.
inline constexpr double kLevels = 2e-9;
// Published numbers: of 8 digits and 4 behind the point, absolute, and the errors of the
// quantisers, of four digits, relative.
inline constexpr double kPublished8 = 1e-6;
inline constexpr double kPublished4 = 1e-4;
inline constexpr double kPublishedError = 5e-4;
// A kept number (tests/golden) against today's, near 0, absolute.
inline constexpr double kGoldenZero = 1e-12;

// weight_exp against the exponential in double, relative: less than four units of binary32's last
// place.
inline constexpr double kExponential = 2e-7;
// fixed_tanh against the same in double, relative: two such exponentials and a division.
inline constexpr double kTanh = 4e-7;
// A rotated row against the same in double, absolute: 9 rounds of additions of numbers of size 1 to
// 4.
inline constexpr double kRotation = 2e-5;
// Products of two of the rotation's columns against 0 or 1, absolute: the same rounds, of smaller
// numbers.
inline constexpr double kRotationColumns = 3e-6;

// A search for the threshold of the certificate against the bound that it looks for, relative to
// epsilon: the sums are of binary32 terms in another order.
inline constexpr double kSearch = 1e-5;

// A step in binary32 against the reference in double. A logit l has an error of about 1e-6 |l| (64
// to 256 rounded products), so a weight has that relative error; D, the certificate and the output
// inherit it. 1e-3 leaves room for logits up to a few hundred.
inline constexpr double kStepEpsilon = 1e-3;   // relative
inline constexpr double kStepOutput = 1e-3;    // relative to the output's length
inline constexpr double kStepLse = 1e-4;       // absolute,
inline constexpr double kStepLseShare = 1e-6;  // and relative
// An output that nearly cancels keeps the error of its summands, which are of size about 1.
inline constexpr double kStepOutputFloor = 0.01;
// Certificates below lose their variance, a sum of squares, to the smallest binary32 number.
inline constexpr double kSmallestEpsilon = 1e-18;

// The estimated error of the output, relative: spreads are stored in 16 bits, 2e-3, and counts of
// drawn tokens may nearly cancel their weights.
inline constexpr double kStepOutputError = 0.02;

// The same where logits reach 1e4: they are known to 1e-3, and so are weights and all that is made
// of them; the certificate can be that of a single token 1e-10 below the rest.
inline constexpr double kStepLargeEpsilon = 0.02;
inline constexpr double kStepLargeOutput = 0.02;
inline constexpr double kStepLargeLse = 0.01;

// A step that reads everything against dense attention in double, relative output and absolute LSE:
// 80 rounded products of a logit of some tens, then binary32 sums.
inline constexpr double kDense = 2e-5;
// The same at logits of 1e4, of integers: products and sums are exact, and the scale and the
// exponentials round at 1e4 times 1e-7.
inline constexpr double kDenseLargeOutput = 2e-3;
inline constexpr double kDenseLargeLse = 4e-3;
// A step that found its dominant token against dense attention, absolute LSE: the rest weighs so
// much.
inline constexpr double kDominantLse = 1e-3;
// Redraws: what the mean of D_hat / D is off by beside its noise.
inline constexpr double kRedrawBias = 1e-5;
// The replay program's dense rows, and its sums of output errors on two backends, relative: rows
// are summed in another order.
inline constexpr double kReplay = 1e-5;

// Outputs and LSE of one backend in two batches, or of two backends, relative to the largest value:
// weighted rows are summed in tiles whose number follows the grid, so outputs differ by a few units
// of binary32's last place times the root of the number of rows; the LSE is the logarithm of such a
// sum.
inline constexpr double kRowOrder = 2e-5;
// The estimated error of the output on two backends, relative: terms are equal to the bit and
// positive; where 32 of them are added in binary32, the other backend adds in double.
inline constexpr double kBackendOutputError = 1e-5;

}  // namespace verkv::tolerance

#endif  // VERKV_TESTS_TOLERANCE_HPP
