/** The texts of the pages in each language, in plain words. If nothing was charged, the page says so. */
import type { ErrorCode } from '#kernel';

/** Faults of the form's fields. */
export const FIELD_FAULTS = ['card_number', 'expiry', 'expired', 'security_code', 'email', 'card_in_text', 'control_in_text', 'too_long'] as const;
export type FieldFault = (typeof FIELD_FAULTS)[number];

export interface Text {
  readonly securePayment: string;
  readonly testMode: string;
  readonly testCard: string;
  readonly payTo: (agency: string) => string;
  readonly errorPrefix: string;
  readonly whatYouPay: string;
  readonly item: string;
  readonly amount: string;
  readonly reference: string;
  readonly subtotal: string;
  readonly serviceFee: string;
  readonly total: string;
  readonly card: string;
  readonly cardNumber: string;
  readonly expiry: string;
  readonly expiryHint: string;
  readonly securityCode: string;
  readonly securityCodeHint: string;
  readonly postalCode: string;
  readonly aboutYou: string;
  readonly firstName: string;
  readonly lastName: string;
  readonly email: string;
  readonly optional: string;
  readonly pay: (total: string) => string;
  readonly paying: string;
  readonly cancel: string;
  readonly cancelAndReturn: (agency: string) => string;
  readonly notStored: string;
  readonly closesAt: string;
  readonly moreTime: string;
  readonly problem: string;
  readonly faults: Readonly<Record<FieldFault, string>>;
  readonly nothingTaken: string;
  readonly feeChanged: string;
  readonly formOutOfDate: string;
  readonly declines: Readonly<Record<string, string>>;
  readonly refusals: Readonly<Partial<Record<ErrorCode, string>>>;
  readonly otherRefusal: string;
  readonly attemptsUsedUp: string;
  readonly attemptsUsedUpMore: string;
  readonly processing: string;
  readonly processingMore: string;
  readonly processingLate: string;
  readonly paid: string;
  readonly paidTo: string;
  readonly confirmation: string;
  readonly date: string;
  readonly cardEnding: (brand: string, last4: string) => string;
  readonly returned: string;
  readonly settlementRejected: string;
  readonly done: string;
  readonly print: string;
  readonly keepReceipt: string;
  readonly cancelled: string;
  readonly cancelledMore: string;
  readonly expired: string;
  readonly expiredMore: string;
  readonly alreadyPaid: string;
  readonly alreadyPaidMore: string;
  readonly complete: string;
  readonly completeMore: string;
  readonly showReceipt: string;
  readonly returnTo: (agency: string) => string;
  readonly cannotStart: string;
  readonly cannotStartMore: Readonly<Partial<Record<ErrorCode, string>>>;
  readonly askAgency: string;
  readonly notFound: string;
  readonly notFoundMore: string;
  readonly otherBrowser: string;
  readonly otherBrowserMore: string;
  readonly notFromHere: string;
  readonly notFromHereMore: string;
  readonly tooMany: string;
  readonly tooManyMore: string;
  readonly unavailable: string;
  readonly unavailableMore: string;
  readonly failedInside: string;
  readonly failedInsideMore: string;
  readonly toPaymentPage: string;
}

export const LOCALES = ['en', 'es'] as const;
export type Locale = (typeof LOCALES)[number];

const en: Text = {
  securePayment: 'Secure payment',
  testMode: 'Test mode. No real money moves.',
  testCard: 'Try card 4242 4242 4242 4242, any later month, any code.',
  payTo: (agency) => `Pay ${agency}`,
  errorPrefix: 'Error: ',
  whatYouPay: 'What you are paying',
  item: 'Item',
  amount: 'Amount',
  reference: 'Reference',
  subtotal: 'Subtotal',
  serviceFee: 'Service fee',
  total: 'Total',
  card: 'Card',
  cardNumber: 'Card number',
  expiry: 'Expires',
  expiryHint: 'MM/YY',
  securityCode: 'Security code',
  securityCodeHint: '3 or 4 digits',
  postalCode: 'ZIP code',
  aboutYou: 'About you',
  firstName: 'First name',
  lastName: 'Last name',
  email: 'E-mail',
  optional: 'optional',
  pay: (total) => `Pay ${total}`,
  paying: 'Paying…',
  cancel: 'Cancel this payment?',
  cancelAndReturn: (agency) => `Cancel and go back to ${agency}`,
  notStored: 'Your card number goes to the card processor over an encrypted connection and is not stored here.',
  closesAt: 'For your safety this page closes at',
  moreTime: 'I need more time',
  problem: 'There is a problem',
  faults: {
    card_number: 'Enter the number on the front of your card',
    expiry: 'Enter the expiry date as MM/YY, for example 04/29',
    expired: 'This card has expired. Use another one',
    security_code: 'Enter the 3 or 4 digits of the security code',
    email: 'Enter an e-mail address like name@example.com, or leave it empty',
    card_in_text: 'This field must not hold a card number',
    control_in_text: 'This field holds a character that cannot be printed: please type it again',
    too_long: 'This is too long',
  },
  nothingTaken: 'No money has been taken.',
  feeChanged: 'The service fee changed while you were here. Please look at the new total before you pay.',
  formOutOfDate: 'This page was out of date. Please enter your card again.',
  declines: {
    generic_decline: 'Your card was declined. Try another card, or ask your bank.',
    insufficient_funds: 'Your card was declined: there is not enough money on the account. Try another card.',
    card_limit_exceeded: 'Your card was declined: the limit of the card is reached. Try another card.',
    expired_card: 'Your card was declined: your bank says that it has expired. Try another card.',
    cvv_mismatch: 'Your card was declined: the security code does not match. Check it and try again.',
    postal_code_mismatch: 'Your card was declined: the ZIP code does not match. Check it and try again.',
    invalid_token: 'The card details can no longer be used. Please enter your card again.',
  },
  refusals: {
    PAYMENT_GATEWAY_ERROR: 'The payment did not go through. Please try again in a moment.',
    PAYMENT_TIMEOUT: 'Your bank did not answer, so the payment was called off. A pending entry on your card will disappear. You can try again.',
    PORTAL_ACCESS_DENIED: 'Online payment is not available here at the moment.',
    GATEWAY_NOT_CONFIGURED: 'Online payment is not available here at the moment.',
    PAYMENT_BLOCKED: 'This case cannot be paid online. Please contact the agency.',
    PAYMENT_HELD: 'This case cannot be paid online right now. Please try later, or contact the agency.',
    PAYMENT_NOT_ALLOWED: 'The agency does not take this payment or this kind of card online. Try another card, or contact the agency.',
    DECLINE_BLOCKED: 'This card was declined too often and is blocked for a while. Try another card.',
    VELOCITY_LIMIT: 'There were too many attempts. Please wait a while, or use another card.',
    RATE_LIMITED: 'Too many people are paying at this moment. Please wait a moment and try again.',
    VALIDATION_ERROR: 'The card details were not accepted. Check them and try again.',
  },
  otherRefusal: 'The payment did not go through.',
  attemptsUsedUp: 'Too many attempts',
  attemptsUsedUpMore: 'This page takes no more cards. Go back to the agency to start again.',
  processing: 'We are checking with your bank',
  processingMore: 'This can take a moment. Please do not pay again and do not close this page.',
  processingLate:
    'Your bank has not answered yet. You can wait here, or go back now: the agency can look the payment up by this reference. Do not pay again before it has.',
  paid: 'Payment complete',
  paidTo: 'Paid to',
  confirmation: 'Confirmation number',
  date: 'Date',
  cardEnding: (brand, last4) => `${brand} ending in ${last4}`,
  returned: 'Returned to you',
  settlementRejected: 'The bank did not send this money to the agency. Please contact the agency.',
  done: 'Done',
  print: 'Print receipt',
  keepReceipt: 'Keep the confirmation number. Press Done to finish with the agency.',
  cancelled: 'Payment cancelled',
  cancelledMore: 'You can close this page, or go back to the agency.',
  expired: 'This page has expired',
  expiredMore: 'It was open for too long. Go back to the agency to start again.',
  alreadyPaid: 'This is already paid',
  alreadyPaidMore: 'The link that you followed was used for a payment that went through. You need not pay again.',
  complete: 'This payment is complete',
  completeMore: 'The receipt shows only in the browser that paid.',
  showReceipt: 'Show the receipt',
  returnTo: (agency) => `Go back to ${agency}`,
  cannotStart: 'The payment cannot be started',
  cannotStartMore: {
    PORTAL_ACCESS_DENIED: 'Online payment is not available for this agency.',
    VALIDATION_ERROR: 'The link or the page that sent you here is not complete.',
  },
  askAgency: 'Go back to the agency and try again. If that does not help, tell them this reference:',
  notFound: 'There is no such payment page',
  notFoundMore: 'The address may be incomplete. Go back to the agency and start again.',
  otherBrowser: 'This payment was started in another browser',
  otherBrowserMore: 'For your safety it goes on only there. Go back to the agency to start again here.',
  notFromHere: 'This did not come from our page',
  notFromHereMore: 'For your safety nothing was done. Open the payment page again and press Pay there. Cookies must be allowed for this site.',
  tooMany: 'Too many requests',
  tooManyMore: 'Please wait a minute and try again.',
  unavailable: 'Payments are not possible at the moment',
  unavailableMore: 'Nothing was charged by this attempt. Please try again later. If you already paid this amount, do not pay again. Ask the agency.',
  failedInside: 'Something went wrong on our side',
  failedInsideMore: 'Please try again in a moment. If you had pressed Pay, go back to the payment page first: it knows whether you paid.',
  toPaymentPage: 'Go to the payment page',
};

const es: Text = {
  securePayment: 'Pago seguro',
  testMode: 'Modo de prueba. No se mueve dinero real.',
  testCard: 'Pruebe la tarjeta 4242 4242 4242 4242, cualquier mes futuro, cualquier código.',
  payTo: (agency) => `Pagar a ${agency}`,
  errorPrefix: 'Error: ',
  whatYouPay: 'Lo que va a pagar',
  item: 'Concepto',
  amount: 'Importe',
  reference: 'Referencia',
  subtotal: 'Subtotal',
  serviceFee: 'Cargo por servicio',
  total: 'Total',
  card: 'Tarjeta',
  cardNumber: 'Número de tarjeta',
  expiry: 'Vence',
  expiryHint: 'MM/AA',
  securityCode: 'Código de seguridad',
  securityCodeHint: '3 o 4 dígitos',
  postalCode: 'Código postal',
  aboutYou: 'Sus datos',
  firstName: 'Nombre',
  lastName: 'Apellidos',
  email: 'Correo electrónico',
  optional: 'opcional',
  pay: (total) => `Pagar ${total}`,
  paying: 'Pagando…',
  cancel: '¿Cancelar este pago?',
  cancelAndReturn: (agency) => `Cancelar y volver a ${agency}`,
  notStored: 'El número de su tarjeta va al procesador por una conexión cifrada y no se guarda aquí.',
  closesAt: 'Por su seguridad, esta página se cierra a las',
  moreTime: 'Necesito más tiempo',
  problem: 'Hay un problema',
  faults: {
    card_number: 'Escriba el número que está en el frente de su tarjeta',
    expiry: 'Escriba la fecha de vencimiento como MM/AA, por ejemplo 04/29',
    expired: 'Esta tarjeta está vencida. Use otra',
    security_code: 'Escriba los 3 o 4 dígitos del código de seguridad',
    email: 'Escriba un correo como nombre@ejemplo.com, o déjelo vacío',
    card_in_text: 'Este campo no debe contener un número de tarjeta',
    control_in_text: 'Este campo contiene un carácter que no se puede imprimir: escríbalo de nuevo',
    too_long: 'Es demasiado largo',
  },
  nothingTaken: 'No se ha cobrado nada.',
  feeChanged: 'El cargo por servicio cambió mientras usted estaba aquí. Mire el nuevo total antes de pagar.',
  formOutOfDate: 'Esta página ya no estaba al día. Escriba su tarjeta otra vez.',
  declines: {
    generic_decline: 'Su tarjeta fue rechazada. Pruebe con otra o consulte a su banco.',
    insufficient_funds: 'Su tarjeta fue rechazada: no hay fondos suficientes. Pruebe con otra.',
    card_limit_exceeded: 'Su tarjeta fue rechazada: se alcanzó su límite. Pruebe con otra.',
    expired_card: 'Su tarjeta fue rechazada: su banco indica que está vencida. Pruebe con otra.',
    cvv_mismatch: 'Su tarjeta fue rechazada: el código de seguridad no coincide. Revíselo e intente de nuevo.',
    postal_code_mismatch: 'Su tarjeta fue rechazada: el código postal no coincide. Revíselo e intente de nuevo.',
    invalid_token: 'Los datos de la tarjeta ya no se pueden usar. Escriba su tarjeta otra vez.',
  },
  refusals: {
    PAYMENT_GATEWAY_ERROR: 'El pago no se realizó. Intente de nuevo en un momento.',
    PAYMENT_TIMEOUT: 'Su banco no respondió y el pago se anuló. Si ve un cargo pendiente en su tarjeta, desaparecerá. Puede intentar de nuevo.',
    PORTAL_ACCESS_DENIED: 'El pago en línea no está disponible en este momento.',
    GATEWAY_NOT_CONFIGURED: 'El pago en línea no está disponible en este momento.',
    PAYMENT_BLOCKED: 'Este caso no se puede pagar en línea. Comuníquese con la agencia.',
    PAYMENT_HELD: 'Este caso no se puede pagar en línea ahora. Intente más tarde o comuníquese con la agencia.',
    PAYMENT_NOT_ALLOWED: 'La agencia no acepta en línea este pago o este tipo de tarjeta. Pruebe con otra o comuníquese con la agencia.',
    DECLINE_BLOCKED: 'Esta tarjeta fue rechazada demasiadas veces y está bloqueada por un tiempo. Pruebe con otra.',
    VELOCITY_LIMIT: 'Hubo demasiados intentos. Espere un rato o use otra tarjeta.',
    RATE_LIMITED: 'Muchas personas están pagando en este momento. Espere un momento e intente de nuevo.',
    VALIDATION_ERROR: 'Los datos de la tarjeta no fueron aceptados. Revíselos e intente de nuevo.',
  },
  otherRefusal: 'El pago no se realizó.',
  attemptsUsedUp: 'Demasiados intentos',
  attemptsUsedUpMore: 'Esta página no acepta más tarjetas. Vuelva a la agencia para empezar de nuevo.',
  processing: 'Estamos consultando a su banco',
  processingMore: 'Puede tardar un momento. No pague otra vez y no cierre esta página.',
  processingLate:
    'Su banco todavía no ha respondido. Puede esperar aquí o volver ahora: la agencia puede consultar el pago con esta referencia. No pague otra vez antes.',
  paid: 'Pago realizado',
  paidTo: 'Pagado a',
  confirmation: 'Número de confirmación',
  date: 'Fecha',
  cardEnding: (brand, last4) => `${brand} terminada en ${last4}`,
  returned: 'Devuelto a usted',
  settlementRejected: 'El banco no envió este dinero a la agencia. Póngase en contacto con la agencia.',
  done: 'Listo',
  print: 'Imprimir el recibo',
  keepReceipt: 'Guarde el número de confirmación. Pulse Listo para terminar con la agencia.',
  cancelled: 'Pago cancelado',
  cancelledMore: 'Puede cerrar esta página o volver a la agencia.',
  expired: 'Esta página ha caducado',
  expiredMore: 'Estuvo abierta demasiado tiempo. Vuelva a la agencia para empezar de nuevo.',
  alreadyPaid: 'Esto ya está pagado',
  alreadyPaidMore: 'El enlace que abrió se usó para un pago que se realizó. No necesita pagar otra vez.',
  complete: 'Este pago está completo',
  completeMore: 'El recibo se muestra solo en el navegador que pagó.',
  showReceipt: 'Ver el recibo',
  returnTo: (agency) => `Volver a ${agency}`,
  cannotStart: 'No se puede iniciar el pago',
  cannotStartMore: {
    PORTAL_ACCESS_DENIED: 'El pago en línea no está disponible para esta agencia.',
    VALIDATION_ERROR: 'El enlace o la página que lo envió aquí está incompleto.',
  },
  askAgency: 'Vuelva a la agencia e intente de nuevo. Si no funciona, dígales esta referencia:',
  notFound: 'No existe esta página de pago',
  notFoundMore: 'La dirección puede estar incompleta. Vuelva a la agencia y empiece de nuevo.',
  otherBrowser: 'Este pago se inició en otro navegador',
  otherBrowserMore: 'Por su seguridad solo continúa allí. Vuelva a la agencia para empezar de nuevo aquí.',
  notFromHere: 'Esto no vino de nuestra página',
  notFromHereMore:
    'Por su seguridad no se hizo nada. Abra otra vez la página de pago y pulse Pagar allí. Las cookies deben estar permitidas para este sitio.',
  tooMany: 'Demasiadas solicitudes',
  tooManyMore: 'Espere un minuto e intente de nuevo.',
  unavailable: 'En este momento no es posible pagar',
  unavailableMore:
    'No se cobró nada con este intento. Intente de nuevo más tarde. Si ya pagó este importe, no pague otra vez. Consulte a la agencia.',
  failedInside: 'Algo falló de nuestro lado',
  failedInsideMore: 'Intente de nuevo en un momento. Si había pulsado Pagar, vuelva primero a la página de pago: ella sabe si usted pagó.',
  toPaymentPage: 'Ir a la página de pago',
};

export const TEXTS: Readonly<Record<Locale, Text>> = { en, es };

/**
 * The first of the given languages in which the pages are written, else English. Each argument is a tag, an `Accept-Language` header, or null. Only
 * the language of a tag counts (`es-MX` is `es`).
 */
export const localeOf = (...wishes: readonly (string | null | undefined)[]): Locale => {
  for (const wish of wishes)
    for (const tag of (wish ?? '').split(',')) {
      const language = tag.trim().split(/[-;]/)[0]!.toLowerCase();
      const known = LOCALES.find((locale) => locale === language);
      if (known) return known;
    }
  return 'en';
};
