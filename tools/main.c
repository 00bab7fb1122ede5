/* SPDX-License-Identifier: Apache-2.0 */
/* main */
int main(void) { return 0; }
